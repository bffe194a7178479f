# SPDX-License-Identifier: Apache-2.0
"""The memory of this process, for what Megatron asks of a CUDA device."""

import math
from pathlib import Path
from typing import Any


class ProcessMemory:
    """Memory of this process and machine as the operating system reports it: bytes, or NaN where it does not."""

    @staticmethod
    def _proc_field(path: str, field: str) -> float:
        try:
            text = Path(path).read_text()
        except OSError:
            return math.nan
        kibibytes = next((line.split()[1] for line in text.splitlines() if line.startswith(field + ":")), None)
        return math.nan if kibibytes is None else int(kibibytes) * 1024

    @classmethod
    def resident(cls, device: Any = None) -> float:
        """Return the resident set size now."""
        return cls._proc_field("/proc/self/status", "VmRSS")

    @classmethod
    def peak_resident(cls, device: Any = None) -> float:
        """Return the largest resident set size so far, or since `reset_peak`."""
        # The kernel counts the two apart, so the peak can lag by some pages.
        return max(cls._proc_field("/proc/self/status", "VmHWM"), cls.resident())

    @staticmethod
    def reset_peak(device: Any = None) -> None:
        """Restart the peak from the resident set size now.

        Raises:
            OSError: If the operating system has no such reset.
        """
        Path("/proc/self/clear_refs").write_text("5")

    @classmethod
    def machine(cls, device: Any = None) -> tuple[float, float]:
        """Return the memory available to new allocations on this machine, and memory in all."""
        return cls._proc_field("/proc/meminfo", "MemAvailable"), cls._proc_field("/proc/meminfo", "MemTotal")

    @classmethod
    def machine_used(cls, device: Any = None) -> float:
        """Return the memory in use on this machine by all processes."""
        available, total = cls.machine()
        return total - available

    @classmethod
    def stats(cls, device: Any = None) -> dict[str, float]:
        """Return what Megatron logs of `torch.cuda.memory_stats`. A number of allocations is not known: NaN."""
        now, peak = cls.resident(), cls.peak_resident()
        return {
            "reserved_bytes.all.current": now,
            "reserved_bytes.all.peak": peak,
            "allocated_bytes.all.current": now,
            "allocated_bytes.all.peak": peak,
            "allocation.all.current": math.nan,
        }
