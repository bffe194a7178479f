# SPDX-License-Identifier: Apache-2.0
"""Named ranges for profilers: torch.profiler, and Nsight Systems through `torch.autograd.profiler.emit_nvtx`."""

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

_NO_RANGE: AbstractContextManager[object] = nullcontext()


def annotate(action: str, subject: str) -> AbstractContextManager[object]:
    """Return a context that is a range `csbp/ACTION/SUBJECT` in whatever profiler is running.

    Without a profiler this is one look at a flag: entering a `record_function` would cost microseconds even then.

    Args:
        action: what is done, such as `forward` or `wait`.
        subject: what it is done to, such as a tile kind.
    """
    # The flag is torch's own; profile() and emit_nvtx() set it.
    return profiler.record_function(f"csbp/{action}/{subject}") if profiler._is_profiler_enabled else _NO_RANGE
