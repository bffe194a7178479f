# SPDX-License-Identifier: Apache-2.0
"""The address at which ranks meet: the port is free, the name is known."""

import os
import socket

from megatron_csbp.doctor.findings import Finding, fail, ok, warn

_DEFAULT_PORT = 29500
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def check_network(has_store: bool) -> list[Finding]:
    """Look at the port and at this machine's name.

    Args:
        has_store: whether ranks have met at the address already, so that the port is taken by themselves.
    """
    findings = [host_name(), *interfaces()]
    if not has_store:
        findings.append(port(os.environ.get("MASTER_PORT", str(_DEFAULT_PORT))))
    return findings


def port(number: str) -> Finding:
    """Judge whether a run could listen on a port of this machine."""
    name = f"port {number}"
    if not number.isdigit() or not 0 < int(number) < 2**16:
        return fail(name, "MASTER_PORT is no port", "export MASTER_PORT=29500, or any other number below 65536")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As a store does: a port that was closed a moment ago is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(number)))
        except OSError as error:
            fix = f"export MASTER_PORT={_another(int(number))}, or torchrun --master-port; ss -ltnp shows who has it"
            return fail(name, f"is taken ({error.strerror})", fix)
    return ok(name, "is free")


def _another(number: int) -> int:
    with socket.socket() as probe:
        for other in range(number + 1, number + 100):
            try:
                probe.bind(("", other % 2**16))
            except OSError:
                continue
            return other % 2**16
    return _DEFAULT_PORT


def host_name() -> Finding:
    """Judge what this machine's name stands for: gloo listens there, and other nodes connect to it."""
    host = socket.gethostname()
    try:
        addresses = sorted({str(found[4][0]) for found in socket.getaddrinfo(host, None)})
    except OSError as error:
        fix = "add it to /etc/hosts, or export GLOO_SOCKET_IFNAME=INTERFACE (on one machine: lo)"
        return warn("host name", f"{host} is known to no resolver ({error.strerror}): gloo cannot start", fix)
    detail = f"{host} is {', '.join(addresses)}"
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        fix = "on several nodes export GLOO_SOCKET_IFNAME=INTERFACE and NCCL_SOCKET_IFNAME=INTERFACE (ip addr)"
        if any(os.environ.get(name) for name in _INTERFACES):
            return ok("host name", f"{detail}; an interface is named")
        return warn("host name", f"{detail}: other nodes cannot reach this address", fix)
    return ok("host name", detail)


def interfaces() -> list[Finding]:
    """Judge the interfaces that variables name."""
    there = [name for _, name in socket.if_nameindex()]
    findings = []
    for variable in _INTERFACES:
        value = os.environ.get(variable)
        wanted = [part.lstrip("=") for part in (value or "").split(",") if part and not part.startswith("^")]
        missing = [part for part in wanted if not any(name.startswith(part) for name in there)]
        if missing:
            detail = f"{value}, and this machine has {', '.join(there)}"
            findings.append(fail(variable, detail, f"export {variable}={next(iter(there[1:] or there))}, or unset it"))
        elif value:
            findings.append(ok(variable, value))
    return findings
