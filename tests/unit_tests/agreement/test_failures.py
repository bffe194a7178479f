# SPDX-License-Identifier: Apache-2.0
"""Whether an error is a rank's own, and what a rank says that it does; whole runs are in tests/functional."""

import threading

import pytest
from torch.distributed import DistBackendError, HashStore

from megatron_csbp.agreement import failures

GLOO = RuntimeError("[/gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.1]:47")


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error, was_left",
    [
        (GLOO, True),
        (RuntimeError("Timed out waiting 600000ms for recv operation to complete"), True),
        (RuntimeError("Application timeout caused pair closure: Broken pipe"), True),
        (DistBackendError("NCCL error in ProcessGroupNCCL.cpp: remote process exited"), True),
        (caused_by(RuntimeError("while saving"), GLOO), True),
        (ValueError("a broken sample"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("the socket of a lamp"), False),
        (MemoryError(), False),
    ],
)
def test_an_error_of_a_collective_is_told_from_a_ranks_own(error: Exception, was_left: bool) -> None:
    assert failures._was_left_waiting(error) is was_left


def test_a_rank_says_where_its_main_thread_is() -> None:
    said = []
    thread = threading.Thread(target=lambda: said.append(failures._doing()))
    thread.start()
    thread.join()  # which the main thread is in
    assert said[0]["waits"] is False
    assert said[0]["place"].startswith("threading.py:")


def test_a_wait_that_runs_out_is_no_answer_and_no_end() -> None:
    """A run lasts longer than any wait: a rank that no longer listened would be taken for a dead one."""
    store = HashStore()
    assert not failures._comes(store, "question", 0.05)
    store.set("question", "")
    assert failures._comes(store, "question", 0.05)


def test_one_rank_needs_no_store_and_keeps_its_errors() -> None:
    with pytest.raises(KeyError), failures.naming_failures({}, rank=0, world_size=1):
        raise KeyError("mine")
