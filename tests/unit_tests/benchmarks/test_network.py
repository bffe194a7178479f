# SPDX-License-Identifier: Apache-2.0
"""Hosts on one machine."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.network import FRAME_OVERHEAD_BYTES, PREFIX, Counters, Network, remove_leftovers, why_unavailable

REASON = why_unavailable()
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=f"network namespaces not checked: {REASON}")
ROOT = Path(__file__).parents[3]


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(PREFIX)]


def ours(network: Network) -> list[str]:
    names = {network.namespace(rank) for rank in range(2)}
    return [name for name in namespaces() if name in names]


def test_payload_is_what_is_left_without_the_headers_of_each_packet() -> None:
    difference = Counters(10_000, 10, 5_000, 5) - Counters(1_000, 1, 500, 1)
    assert difference.received_payload_bytes == 9_000 - 9 * FRAME_OVERHEAD_BYTES
    assert difference.sent_payload_bytes == 4_500 - 4 * FRAME_OVERHEAD_BYTES


@pytest.mark.root
@needs_namespaces
def test_namespaces_are_removed_after_a_failure() -> None:
    network = Network(2)

    def fail() -> None:
        with network:
            assert len(ours(network)) == 2
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert ours(network) == []


@pytest.mark.root
@needs_namespaces
def test_namespaces_of_a_killed_benchmark_are_removed_by_the_next() -> None:
    script = "from benchmarks.network import Network; Network(2).__enter__(); print('made', flush=True); input()"
    killed = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None
    assert killed.stdout.readline() == "made\n"
    left = [name for name in namespaces() if f"-{killed.pid}-" in name]
    killed.kill()
    killed.wait()
    assert len(left) == 3
    remove_leftovers()
    assert [name for name in namespaces() if f"-{killed.pid}-" in name] == []


SENDER = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5001)) as connection:
    connection.sendall(bytes(1_000_000))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
"""
RECEIVER = """
import socket
with socket.create_server(("", 5001)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    while connection.recv(1 << 16): pass
    connection.close()
"""


@pytest.mark.root
@needs_namespaces
def test_a_limited_link_takes_the_time_that_its_rate_says() -> None:
    with Network(2) as network:
        network.limit(2_000_000)
        inside = [["ip", "netns", "exec", network.namespace(rank), sys.executable, "-c"] for rank in range(2)]
        receiver = subprocess.Popen([*inside[0], RECEIVER], stdout=subprocess.PIPE, text=True)
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "listening\n"
        started = time.monotonic()
        subprocess.run([*inside[1], SENDER, network.address(0)], check=True)
        seconds = time.monotonic() - started
        receiver.wait()
    assert seconds > 0.4  # 1 MB at 2 MB/s, less the first burst


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert why_unavailable() == "network namespaces need root"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert why_unavailable() == "no command ip and no command tc (package iproute2)"
