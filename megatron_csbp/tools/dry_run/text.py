# SPDX-License-Identifier: Apache-2.0
"""A plan as lines for a person. Pure."""

from collections.abc import Mapping, Sequence

from megatron_csbp.tools.dry_run.job import Job
from megatron_csbp.tools.dry_run.plan import Plan
from megatron_csbp.tools.dry_run.step_time import ASSUMPTIONS
from megatron_csbp.tools.dry_run.sweep import Candidate

_GIB = 2**30


def plan_lines(plan: Plan, not_checked: Sequence[str], *, built: bool = True) -> list[str]:
    """Return what the planner says of a job.

    Args:
        plan: the plan.
        not_checked: what the command line left open.
        built: whether the model was built, and has the parameters that the plan says.
    """
    return [
        *_head_lines(plan, not_checked, built),
        *_memory_lines(plan),
        *_traffic_lines(plan),
        *_operation_lines(plan),
        *_time_lines(plan),
        "assumed (rates: --gpu, --tables):",
        *(f"  - {assumption}" for assumption in ASSUMPTIONS),
    ]


def _head_lines(plan: Plan, not_checked: Sequence[str], built: bool) -> list[str]:
    job, cluster = plan.job, plan.cluster
    top = job.topology
    known = cluster.tables.model_of(job.network)
    published = "a model that the tables do not know"
    if known is not None:
        name, model = known
        same = "as published" if model.parameters == job.network.parameters else f"published: {model.parameters:,}"
        published = f"{name}, {same}"
    routed = job.network.experts is not None
    active = f", of which a row meets {job.network.active_parameters:,}" if routed else ""
    views = f"{job.views} corrupted {'copy' if job.views == 1 else 'copies'}"
    nodes = -(-top.gpus // cluster.node)
    lines = [
        f"dry run: {top.gpus} x {cluster.gpu}, {nodes} node(s) of {cluster.node}; {top.name}; {job.recompute.name}",
        "  every check of a start passed" + (f"; not checked: {', '.join(not_checked)}" if not_checked else ""),
        f"  parameters: {job.network.parameters:,} ({published}){active}"
        + ("; a rank of each kind was built on meta tensors" if built else ""),
        f"  sample: {job.length:,} clean tokens and {views}, blocks of {job.block_size}; {job.rows:,} rows on a rank",
        *_packed_lines(job),
        f"  iteration: {job.global_batch} samples = {job.global_batch * job.length:,} clean tokens; "
        f"{job.micro_batches} micro-batch(es) of {job.micro_batch} on a rank",
    ]
    return lines


def _packed_lines(job: Job) -> list[str]:
    if job.packed is None:
        return []
    packed = job.packed
    return [
        f"  packed documents, of {packed.number} samples of the data:",
        f"    the median one for time, bytes and operations: {packed.median.in_words()}",
        f"    the one with most rows for memory: {packed.fullest.in_words()}",
    ]


def _memory_lines(plan: Plan) -> list[str]:
    memories = plan.memories
    line = ("  {:<46}" + " {:>14}" * len(memories)).format

    def row(name: str, sizes: Sequence[int | None]) -> str:
        return line(name, *("-" if size is None else f"{size / _GIB:.2f}" for size in sizes))

    held = dict.fromkeys(name for memory in memories for name in memory.held)
    moments = dict.fromkeys(name for memory in memories for name in memory.moments)
    rows = [line("memory of a rank, GiB [modelled]", *(memory.kind for memory in memories))[2:]]
    rows += [line("parameters, million", *(f"{memory.parameters / 1e6:,.1f}" for memory in memories))]
    rows += [row(name, [memory.held.get(name) for memory in memories]) for name in held]
    for moment in moments:
        rows.append(f"  while {moment}:")
        found = [memory.moments.get(moment, {}) for memory in memories]
        parts = dict.fromkeys(name for sizes in found for name in sizes)
        rows += [row(f"  {name}", [sizes.get(name) for sizes in found]) for name in parts]
    rows.append(row(f"fullest moment, of {memories[0].capacity / _GIB:.1f}", [memory.total for memory in memories]))
    rows.append(line("", *("fits" if memory.fits else "DOES NOT FIT" for memory in memories)))
    if plan.job.network.delta_net is not None:
        rows.append("  (what gated delta nets save is an estimate, held against no measurement)")
    return rows


def _traffic_lines(plan: Plan) -> list[str]:
    line = "  {:<46} {:>12} {:>12} {:>12} {:>12}".format
    rows = ["bytes that a rank receives [context group: exact, as the ledger counts them; others: closed forms]"]
    rows.append(line("a layer and micro-batch, MiB", "clean", "corrupted", "tensor", "experts"))
    for name, moved in plan.layers.items():
        sizes = (moved.clean, moved.corrupted, moved.tensor, moved.experts)
        rows.append(line(name, *(f"{size / 2**20:,.2f}" for size in sizes)))
    for memory, stage in zip(plan.memories, plan.traffic, strict=True):
        layers = stage.layers
        received = {
            "clean": layers.clean,
            "corrupted": layers.corrupted,
            "tensor": layers.tensor,
            "experts": layers.experts,
            "pipeline": stage.pipeline,
            "gradients": stage.gradients,
            "weights": stage.weights,
        }
        said = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in received.items() if size)
        rows.append(f"  an iteration of {memory.kind}, GiB: {said or 'nothing'}")
    return rows


def _operation_lines(plan: Plan) -> list[str]:
    operations, tera = plan.operations, 1e12
    states = f", delta nets {operations.states / tera:,.1f}" if operations.states else ""
    return [
        f"useful operations of a sample, TFLOP [closed form]: {operations.total / tera:,.1f} (linear layers "
        f"{operations.linear / tera:,.1f}, attention {operations.attention / tera:,.1f}{states}, logits "
        f"{operations.logits / tera:,.1f} for {plan.job.loss_rows:,} rows with loss on average)"
    ]


def _time_lines(plan: Plan) -> list[str]:
    time = plan.time
    lines = ["time of an iteration, s [modelled]"]
    lines += [f"  {name:<46} {seconds:>14.3f}" for name, seconds in time.parts.items()]
    lines.append(f"  {'sum':<46} {time.seconds:>14.3f}")
    days = "" if time.days is None else f"; {time.days:.2f} days for {plan.job.iterations:,} iterations"
    lines.append(f"  MFU {100 * time.mfu:.1f} %; {time.tokens_per_second:,.0f} clean tokens a second{days}")
    return lines


def comparison_lines(plans: Mapping[str, Plan]) -> list[str]:
    """Return one line for each scheme, and its time relative to the first."""
    first = next(iter(plans.values()))
    line = "  {:<6} {:>10} {:>12} {:>16} {:>10} {:>10} {:>10}".format
    head = ("rows", "GiB of a rank", "GiB exchanged", "waits, s", "step, s", "relative")
    lines = ["the same job by scheme [modelled; exchanged: exact, a rank and iteration]", line("", *head)]
    for name, plan in plans.items():
        moved = max(stage.layers.context for stage in plan.traffic)
        lines.append(
            line(
                name,
                f"{plan.job.rows:,}",
                f"{plan.fullest.total / _GIB:.1f}{'' if plan.fits else ' (!)'}",
                f"{moved / _GIB:.2f}",
                f"{plan.time.exposed:.3f}",
                f"{plan.time.seconds:.2f}",
                f"{plan.time.seconds / first.time.seconds:.3f}",
            )
        )
    if not all(plan.fits for plan in plans.values()):
        lines.append("  (!) does not fit")
    return lines


def sweep_lines(candidates: Sequence[Candidate], limit: int = 10) -> list[str]:
    """Return the topologies that fit, best first, with the flags of the best, and why others do not.

    Args:
        candidates: in their order.
        limit: of those that fit, how many are shown.
    """
    line = "  {:<34} {:>14} {:>10} {:>8}".format
    lines = ["topologies of this cluster, best first [modelled]", line("", "GiB of a rank", "step, s", "MFU")]
    fitting = [candidate for candidate in candidates if candidate.plan is not None and not candidate.reason]
    for candidate in fitting[:limit]:
        plan = candidate.plan
        assert plan is not None
        lines.append(
            line(
                candidate.topology.name,
                f"{plan.fullest.total / _GIB:.1f}",
                f"{plan.time.seconds:.2f}",
                f"{100 * plan.time.mfu:.1f} %",
            )
        )
    if len(fitting) > limit:
        lines.append(f"  ... and {len(fitting) - limit} more that fit (--json has all)")
    if fitting:
        lines.append(f"  flags of the best: {fitting[0].topology.flags()}")
        lines.append("  (its rules are those that the planner knows: check it with dry_run and these flags)")
    else:
        lines.append("  none fits")
    lines.append("  these do not work:")
    lines += [f"    {c.topology.name}: {c.reason}" for c in candidates if c.reason]
    return lines
