# SPDX-License-Identifier: Apache-2.0
"""What one process can find out about its machine."""

from collections.abc import Sequence
from pathlib import Path

from megatron_csbp.doctor.findings import Finding, failed
from megatron_csbp.doctor.folders import check_folder
from megatron_csbp.doctor.hardware import check_hardware
from megatron_csbp.doctor.job import Job
from megatron_csbp.doctor.network import check_network
from megatron_csbp.doctor.software import check_software


def check_machine(has_met: bool = False) -> list[Finding]:
    """Look at packages, devices, limits and the network; without PyTorch at packages only.

    Args:
        has_met: whether this process has met others at the address of the job already.
    """
    software = check_software()
    if failed(finding for finding in software if finding.name in ("Python", "PyTorch")):
        return software
    return [*software, *check_hardware(), *check_network(has_met)]


def folders_of(named: Sequence[str], job: Job | None) -> list[Path]:
    """Return the folders to try: those that are named, those of the job, or else the working directory."""
    names = dict.fromkeys([*named, *(job.folders if job is not None else [])])
    return [Path(name).absolute() for name in names] or [Path.cwd()]


def check_folders(named: Sequence[str], job: Job | None) -> list[Finding]:
    """Try each folder from this process."""
    return [check_folder(folder) for folder in folders_of(named, job)]
