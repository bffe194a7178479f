# SPDX-License-Identifier: Apache-2.0
"""When a rank fails, hangs or is killed, the others end with a line that says which rank, and what it did.

A rank whose collective fails knows only that. It asks all ranks, through the store of the rendezvous, what they are
doing; a thread on each answers while its main thread hangs. Who has failed by itself has left the reason there; who
does not answer was killed. Nothing is sent while all goes well.

With NCCL, PyTorch's watchdog ends a rank whose collective times out before Python can speak. There each rank prints
the reason as soon as another has left one.
"""

import contextlib
import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError, DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from megatron_csbp.agreement.differences import ranks_in_words

_ANSWERS_S = 10.0
_QUESTION = "question"
_LISTENS_S = 3600.0
"""A wait of the store has an end; the next begins where it ends."""
_MOST_LETTERS = 300
# What a collective says when another rank is gone or late.
_LEFT_WAITING = re.compile(r"gloo|nccl|connection (closed|reset|refused)|timed out|broken pipe|socket|\brecv\b", re.I)


class OtherRankFailedError(RuntimeError):
    """Another rank failed, and this one was left waiting for it."""


@contextlib.contextmanager
def naming_failures(environ: Mapping[str, str], rank: int, world_size: int) -> Iterator[None]:
    """Let a failure of any rank be known to all of them by its name.

    Args:
        environ: what the launcher has set.
        rank: of this process.
        world_size: ranks of the job.

    Raises:
        OtherRankFailedError: a collective failed since another rank did, or did not come.
    """
    if world_size < 2 or not {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        yield
        return
    watch = _Watch(environ, rank, world_size)
    try:
        yield
    except SystemExit as leaving:
        if leaving.code:
            watch.leave_reason(f"left with status {leaving.code}")
        raise
    except Exception as error:
        if _was_left_waiting(error):
            raise OtherRankFailedError(watch.who_failed()) from error
        watch.leave_reason(f"{type(error).__name__}: {_first_line(error)}")
        raise


class _Watch:
    """This rank's end of the questions and answers."""

    def __init__(self, environ: Mapping[str, str], rank: int, world_size: int) -> None:
        """Start to listen."""
        self._rank, self._world_size = rank, world_size
        self._environ = environ
        self._store = self._connected()
        threading.Thread(target=self._listen, name="failures", daemon=True).start()

    def _connected(self) -> Store:
        # A connection of its own for each thread: a client is busy while it waits.
        store = TCPStore(
            self._environ["MASTER_ADDR"],
            int(self._environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=_ANSWERS_S),
        )
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
        return PrefixStore(
            "/".join(["megatron_csbp/failures", *(self._environ.get(name, "") for name in names)]), store
        )

    def _listen(self) -> None:
        """Wait for a question and answer it once; without Python's lock, so that it costs nothing."""
        try:
            store = self._connected()
            while not _comes(store, _QUESTION, _LISTENS_S):
                pass
            store.set(f"doing/{self._rank}", json.dumps(_doing() | {"host": os.uname().nodename}))
            if dist.is_initialized() and dist.get_backend() == "nccl":
                said = str(store.get(_QUESTION), "utf-8")
                if said:
                    print(f"megatron_csbp: rank {self._rank}: {said}", file=sys.stderr, flush=True)
        except RuntimeError:  # the store is gone, and with it whoever could ask
            return

    def leave_reason(self, reason: str) -> None:
        """Say why this rank ends, for others to read."""
        reason = reason[:_MOST_LETTERS]
        with contextlib.suppress(RuntimeError):
            self._store.set(f"reason/{self._rank}", json.dumps({"reason": reason, "host": os.uname().nodename}))
            self._store.set(_QUESTION, f"rank {self._rank} ({os.uname().nodename}) failed: {reason}")
            if self._rank == 0 and self._environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
                # This process serves the store.
                self._wait_for([f"read/{other}" for other in range(1, self._world_size)])

    def who_failed(self) -> str:
        """Ask all ranks, and say which failed, are gone, or hang."""
        try:
            return self._asked()
        except RuntimeError:
            return "rank 0 does not answer: it was killed, or its machine is gone (it served the store of the job)"

    def _asked(self) -> str:
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        self._store.set(_QUESTION, "")
        # A reason may still be on its way where a connection has been closed already.
        self._wait_for([f"doing/{rank}" for rank in others])
        reasons = {rank: self._read(f"reason/{rank}") for rank in others}
        doing = {rank: self._read(f"doing/{rank}") for rank in others}
        self._store.set(f"read/{self._rank}", "")
        if any(reasons.values()):
            return "; ".join(
                f"rank {rank} ({found['host']}) failed: {found['reason']}" for rank, found in reasons.items() if found
            )
        gone = [rank for rank in others if not doing[rank]]
        if gone:
            does = "does" if len(gone) == 1 else "do"
            return f"{ranks_in_words(gone)} {does} not answer: killed, or the machine is gone"
        busy = [(rank, found) for rank, found in doing.items() if found and not found["waits"]]
        if busy:
            return "; ".join(
                f"rank {rank} ({found['host']}) has not come to the collective: it is in {found['place']}"
                for rank, found in busy[:4]
            )
        rank, found = next((rank, found) for rank, found in doing.items() if found)
        return f"all ranks wait for each other; rank {rank} ({found['host']}) in {found['place']}"

    def _wait_for(self, keys: list[str]) -> None:
        with contextlib.suppress(DistStoreError):
            self._store.wait(keys, timedelta(seconds=_ANSWERS_S))

    def _read(self, key: str) -> dict[str, Any]:
        if not self._store.check([key]):
            return {}
        found: dict[str, Any] = json.loads(self._store.get(key))
        return found


def _comes(store: Store, key: str, seconds: float) -> bool:
    """Wait for a key; return whether it came in time."""
    try:
        store.wait([key], timedelta(seconds=seconds))
    except DistStoreError:
        return False
    return True


def _doing() -> dict[str, Any]:
    """Return where the main thread of this process is, and whether it waits for others there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame)
    waits = any("torch/distributed/" in entry.filename for entry in stack[-3:]) or ".wait(" in (stack[-1].line or "")
    own = next((entry for entry in reversed(stack) if "/torch/" not in entry.filename), stack[-1])
    place = f"{os.path.basename(own.filename)}:{own.lineno}, {own.name}: {own.line}"
    return {"place": place[:_MOST_LETTERS], "waits": waits}


def _was_left_waiting(error: BaseException) -> bool:
    """Return whether an error, or one that it came of, is of a collective that others did not join."""
    if isinstance(error, DistError):
        return True
    cause = error.__cause__ or error.__context__
    is_of_collective = isinstance(error, RuntimeError) and _LEFT_WAITING.search(_first_line(error)) is not None
    return is_of_collective or (cause is not None and _was_left_waiting(cause))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")
