# SPDX-License-Identifier: Apache-2.0
"""The doctor under torchrun or srun: every machine is looked at, and what lies between them."""

import os
from collections.abc import Sequence

import torch.distributed as dist

from megatron_csbp.doctor import group
from megatron_csbp.doctor.findings import Finding, merged, ok
from megatron_csbp.doctor.gather_speed import check_gather
from megatron_csbp.doctor.job import Job, check_job
from megatron_csbp.doctor.launcher import Place
from megatron_csbp.doctor.one_machine import check_folders, check_machine, folders_of


def look_from_all(
    here: Place, words: Sequence[str], ranks: int | None, named: Sequence[str]
) -> tuple[list[Finding], Job | None]:
    """Look from every rank. All ranks call.

    Args:
        here: this process among all.
        words: launch arguments.
        ranks: of the job; None for as many as run here.
        named: folders to try.

    Returns:
        On rank 0 the findings of all ranks, and the job, if there are launch arguments; elsewhere no findings. Where
        the ranks do not meet, each machine's first has its own.
    """
    apart = group.meet(here)
    if apart is not None:
        return ([*check_machine(has_met=True), apart], None) if here.local_rank == 0 else ([], None)
    job: Job | None = group.shared(check_job(words, ranks or here.world_size) if words and here.rank == 0 else None)
    hosts: list[str] = group.shared(group.gathered(os.uname().nodename))
    # One look a machine is enough, and all ranks of a node at once would hold each other up.
    mine = [*check_machine(has_met=True), *check_folders(named, job)] if here.local_rank == 0 else []
    of_ranks = group.gathered([finding.as_json() for finding in mine])
    findings = merged([[Finding.from_json(values) for values in rank] for rank in of_ranks], hosts)
    if here.rank == 0:
        findings.append(ok("ranks meet", f"{here.world_size} rank(s) on {len(set(hosts))} machine(s)"))
    findings += group.check_versions(hosts)
    findings += group.check_clocks(hosts, here)
    for folder in folders_of(named, job):
        findings += group.check_shared(folder, hosts, here)
    sizes = (job.tensor, job.context, job.gather_bytes) if job is not None else (1, here.world_size, 0)
    findings += check_gather(here, *sizes, hosts)
    dist.destroy_process_group()
    return [*findings, *(job.findings if job is not None and here.rank == 0 else [])], job
