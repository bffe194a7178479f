# SPDX-License-Identifier: Apache-2.0
"""Hosts on one machine: a network namespace for each rank, veth pairs, a bridge, and links as slow as asked.

Nothing outside these namespaces is touched, and they are removed on the way out, also after a failure. Needs root and
iproute2; `why_unavailable` says what is missing.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

PREFIX = "csbp-bench"
INTERFACE = "veth0"
SUBNET = "10.77.0"
BURST_BYTES = 128 * 1024
"""What a link sends at once after a pause; above the 64 KiB of the largest segment, so that none has to be cut."""
QUEUE_BYTES = 16 * 1024 * 1024
"""Above what one socket may have unsent, so that a slow link delays and never drops."""
FRAME_OVERHEAD_BYTES = 14 + 20 + 32
"""Headers that an interface counts with each TCP packet: Ethernet, IPv4, TCP with time stamps."""


@dataclass(frozen=True)
class Counters:
    """Bytes and packets of one interface since it came up, as the kernel counts them (headers included)."""

    received_bytes: int
    received_packets: int
    sent_bytes: int
    sent_packets: int

    def __sub__(self, earlier: "Counters") -> "Counters":
        return Counters(
            self.received_bytes - earlier.received_bytes,
            self.received_packets - earlier.received_packets,
            self.sent_bytes - earlier.sent_bytes,
            self.sent_packets - earlier.sent_packets,
        )

    @property
    def received_payload_bytes(self) -> int:
        """Received bytes without Ethernet, IP and TCP headers."""
        return self.received_bytes - FRAME_OVERHEAD_BYTES * self.received_packets

    @property
    def sent_payload_bytes(self) -> int:
        """Sent bytes without Ethernet, IP and TCP headers."""
        return self.sent_bytes - FRAME_OVERHEAD_BYTES * self.sent_packets


def read_counters() -> Counters:
    """Read the counters of the calling process's own interface; call it on a rank."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            fields = [int(number) for number in numbers.split()]
            return Counters(fields[0], fields[1], fields[8], fields[9])
    raise RuntimeError(f"this process has no interface {INTERFACE}; it is not in a namespace of the benchmark")


def read_retransmissions() -> int:
    """Return the segments that TCP has sent again in the calling process's namespace."""
    names, values = (line.split() for line in Path("/proc/self/net/snmp").read_text().splitlines() if "Tcp:" in line)
    return int(values[names.index("RetransSegs")])


def why_unavailable() -> str | None:
    """Return why no namespaces can be made here, or None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"no command {' and no command '.join(missing)} (package iproute2)"
    try:
        with Network(2) as network:
            network.limit(1_000_000)
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` failed: {error.stderr.strip()}"
    return None


class Network:
    """A context manager that makes the hosts of `num_ranks` ranks and removes them.

    Each rank's namespace has one interface, INTERFACE, with the address `address(rank)`; the other ends of the veth
    pairs sit on a bridge in one more namespace.
    """

    def __init__(self, num_ranks: int, resend_seconds: int = 1) -> None:
        """Remember what to make; nothing is made before `with`.

        Args:
            num_ranks: hosts.
            resend_seconds: for how long TCP at least waits for an answer before it sends a segment again. Nothing is
                lost here but by accident; a busy peer answers late, and what is sent twice is counted twice.
        """
        self._num_ranks = num_ranks
        self._resend_seconds = resend_seconds
        self._prefix = f"{PREFIX}-{os.getpid()}"
        self._switch = f"{self._prefix}-switch"

    def namespace(self, rank: int) -> str:
        """Return the name of a rank's network namespace."""
        return f"{self._prefix}-rank{rank}"

    @staticmethod
    def address(rank: int) -> str:
        """Return a rank's IPv4 address."""
        return f"{SUBNET}.{rank + 1}"

    def __enter__(self) -> Self:
        """Make the namespaces, first removing what a killed benchmark has left behind.

        Raises:
            subprocess.CalledProcessError: the kernel or the rights do not allow it; nothing is left behind.
        """
        remove_leftovers()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def limit(self, bytes_per_second: float | None) -> None:
        """Let every rank send at most this fast; None lifts the limit."""
        for rank in range(self._num_ranks):
            tc = ["tc", "-n", self.namespace(rank), "qdisc"]
            _run([*tc, "delete", "dev", INTERFACE, "root"], check=False)
            if bytes_per_second is not None:
                shape = ["tbf", "rate", f"{round(bytes_per_second * 8)}bit"]
                shape += ["burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES)]
                _run([*tc, "add", "dev", INTERFACE, "root", *shape])

    def _make(self) -> None:
        _run(["ip", "netns", "add", self._switch])
        _run(["ip", "-n", self._switch, "link", "add", "bridge0", "type", "bridge"])
        _run(["ip", "-n", self._switch, "link", "set", "bridge0", "up"])
        for rank in range(self._num_ranks):
            name, port = self.namespace(rank), f"port{rank}"
            _run(["ip", "netns", "add", name])
            peer = ["peer", "name", port, "netns", self._switch]
            _run(["ip", "-n", name, "link", "add", INTERFACE, "type", "veth", *peer])
            _run(["ip", "-n", self._switch, "link", "set", port, "master", "bridge0", "up"])
            _run(["ip", "-n", name, "address", "add", f"{self.address(rank)}/24", "dev", INTERFACE])
            _run(["ip", "-n", name, "link", "set", INTERFACE, "up"])
            _run(["ip", "-n", name, "link", "set", "lo", "up"])
            self._tune(name)

    def _tune(self, namespace: str) -> None:
        """Make TCP fit for links that are slow and lose nothing, between hosts that are busy with other things.

        A link that was idle while ranks computed must not start slowly again; a loss-based congestion control never
        holds back where nothing is lost; and a peer that has no processor for a while is not a loss.
        """
        settings = {"tcp_slow_start_after_idle": "0", "tcp_congestion_control": "reno", "tcp_early_retrans": "0"}
        for setting, value in settings.items():
            command = f"echo {value} > /proc/sys/net/ipv4/{setting}"
            _run(["ip", "netns", "exec", namespace, "sh", "-c", command])
        route = ["route", "change", f"{SUBNET}.0/24", "dev", INTERFACE, "rto_min", f"{self._resend_seconds}s"]
        _run(["ip", "-n", namespace, *route])

    def _remove(self) -> None:
        for name in [*(self.namespace(rank) for rank in range(self._num_ranks)), self._switch]:
            _run(["ip", "netns", "delete", name], check=False)


def remove_leftovers() -> None:
    """Remove the namespaces of benchmarks whose process is gone (killed before it could clean up)."""
    listed = _run(["ip", "netns", "list"]).split("\n")
    for name in (line.split()[0] for line in listed if line.startswith(f"{PREFIX}-")):
        pid = name.removeprefix(f"{PREFIX}-").split("-")[0]
        if not Path(f"/proc/{pid}").exists():
            _run(["ip", "netns", "delete", name], check=False)


def _run(command: Sequence[str], check: bool = True) -> str:
    return subprocess.run(command, check=check, capture_output=True, text=True).stdout
