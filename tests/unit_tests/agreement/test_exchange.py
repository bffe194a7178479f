# SPDX-License-Identifier: Apache-2.0
"""The comparison through a real store, with a thread for each rank."""

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from megatron_csbp.agreement import exchange
from megatron_csbp.agreement.differences import Facts

SAME: Facts = {"--lr": "0.1", "the version of numpy": "2"}


def compare(facts: Sequence[Facts | None], timeout_s: float = 5.0) -> list[str]:
    """Return what each rank is told; None among the facts is a rank that does not come."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def rank(number: int) -> str:
        if facts[number] is None:
            return "did not come"
        client = TCPStore(
            "127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        try:
            exchange.check_agreement(PrefixStore("x", client), number, len(facts), facts[number] or {}, timeout_s)
        except ValueError as error:
            return str(error)
        return "agreed"

    with ThreadPoolExecutor(len(facts)) as threads:
        return list(threads.map(rank, range(len(facts))))


def test_ranks_that_agree_go_on() -> None:
    assert compare([SAME] * 4) == ["agreed"] * 4


def test_ranks_that_differ_are_all_told_the_same() -> None:
    told = compare([SAME, SAME, {**SAME, "--lr": "0.2"}, SAME])
    assert len(set(told)) == 1
    assert "the ranks of this job do not agree: --lr is 0.1 on ranks 0-1, 3 and 0.2 on rank 2. Start all" in told[0]


def test_a_rank_that_does_not_come_is_named_to_all_others() -> None:
    told = compare([SAME, SAME, None], timeout_s=1.0)
    assert told[0] == told[1]
    assert told[0].startswith("rank 2 of 3 had not come to the comparison of starts after 1 s")


def test_without_rank_0_the_others_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_SERVES_S", 0.5)
    told = compare([None, SAME], timeout_s=0.5)
    assert told[1].startswith("rank 0 did not answer in the comparison of starts")


def test_a_taken_port_is_named_with_its_remedy() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        environ = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with pytest.raises(ValueError, match=rf"MASTER_PORT={port}: the ranks cannot meet there .*choose another"):
            exchange.job_store(environ, timeout_s=1.0)
