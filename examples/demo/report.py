# SPDX-License-Identifier: Apache-2.0
"""Compares the curves of the demo, counts bytes, and says what came out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sizes import NUM_RANKS, Size, TrafficCase
from training import DemoError, RunRecord

from megatron_csbp.objectives import OBJECTIVES
from megatron_csbp.transformer.geometry.layer_plans import layer_plans
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask

LOSS_TOLERANCE = 2e-6
"""Largest relative difference of two losses that still counts as parity; the log has 7 digits of them."""

FP32_BYTES = 4
PASSES = 3
"""Exchanges of a layer: gather in forward, gather again in backward, reduce-scatter of gradients."""

_SCHEMES = {"CSBP": Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL, "CP": Scheme.CONTEXT_PARALLEL}


@dataclass(frozen=True)
class Parity:
    """Losses of the same iterations in two topologies.

    Attributes:
        iterations: iteration numbers of the shorter run.
        reference: its losses.
        sharded: losses with CSBP.
    """

    iterations: Sequence[int]
    reference: Sequence[float]
    sharded: Sequence[float]

    @property
    def relative_errors(self) -> list[float]:
        """Relative difference of each pair of losses."""
        return [abs(b - a) / abs(a) for a, b in zip(self.reference, self.sharded, strict=True)]

    @property
    def holds(self) -> bool:
        """Whether there are losses and all agree within `LOSS_TOLERANCE` (a NaN does not)."""
        return bool(self.iterations) and all(error <= LOSS_TOLERANCE for error in self.relative_errors)


def compare(reference: RunRecord, sharded: RunRecord) -> Parity:
    """Pair the losses of all iterations of a shorter run with those of the CSBP run."""
    iterations = sorted(reference.losses)
    losses = [sharded.losses.get(i, float("nan")) for i in iterations]
    return Parity(iterations, [reference.losses[i] for i in iterations], losses)


@dataclass(frozen=True)
class Traffic:
    """Bytes that one layer brings one rank from the others, for one micro-batch of one iteration.

    Attributes:
        closed_form: from the attention plan.
        measured: from the byte ledger of rank 0.
    """

    closed_form: int
    measured: int

    @classmethod
    def measure(cls, scheme: str, size: Size, objective: str, ledger: Path) -> "Traffic":
        """Read the first training iteration of a run's ledger, and compute the closed form beside it.

        Raises:
            DemoError: there is no such ledger, or it has no training iteration.
        """
        lines = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.is_file() else []
        trained = [line for line in lines if line["phase"] == "train"]
        if not trained:
            raise DemoError(f"{ledger} has no line of a training iteration.")
        measured = trained[0]["remote_bytes"] // (size.layers * size.diffusion.samples)
        views = OBJECTIVES[objective].default_num_views
        sample = Sample(length=size.sequence_length, block_size=size.block_size, num_views=views)
        closed_form = bytes_per_layer(sample, NUM_RANKS, scheme, size.key_value_heads, size.head_dim, FP32_BYTES)
        return cls(closed_form, measured)


def bytes_per_layer(
    sample: Sample, num_ranks: int, scheme: str, key_value_heads: int, head_dim: int, itemsize: int
) -> int:
    """Return the plan's closed form of what a layer brings one rank, in forward and backward, for one sequence."""
    rows = layer_plans(sample, Sharding(num_ranks, _SCHEMES[scheme]), rank=0)
    row_bytes = 2 * key_value_heads * head_dim * itemsize
    transfers = rows.plan(Mask(CleanAttention.BLOCK_CAUSAL)).transfers
    return PASSES * sum(transfer.gather_bytes(row_bytes) for _, transfer in transfers)


def case_bytes(case: TrafficCase, scheme: str) -> int:
    """Return the closed form for all layers of a case."""
    sample = Sample(length=case.sequence_length, block_size=case.block_size)
    a_layer = bytes_per_layer(sample, case.num_ranks, scheme, case.key_value_heads, case.head_dim, case.itemsize)
    return case.layers * a_layer


def print_parity(parity: Parity) -> None:
    """Print the losses of both topologies side by side."""
    print("\nThe same iterations on one rank and with CSBP on two (lm loss, all digits that Megatron logs)")
    print("  iteration     one rank         CSBP   relative difference")
    rows = zip(parity.iterations, parity.reference, parity.sharded, parity.relative_errors, strict=True)
    for iteration, one, two, error in rows:
        print(f"  {iteration:9d}  {one:11.6f}  {two:11.6f}   {error:.1e}")


def print_summary(
    size: Size,
    runs: Mapping[str, RunRecord],
    entropy: float,
    parity: Mapping[str, Parity],
    traffic: Mapping[str, Traffic],
    case: TrafficCase,
) -> list[str]:
    """Print what came out, and return what failed, a sentence each.

    Args:
        size: of the demo.
        runs: the trainings: "autoregressive", "converted", "from scratch".
        entropy: of the validation text's tokens without context, in nats.
        parity: by what was compared with CSBP.
        traffic: by scheme.
        case: of the paper.
    """
    print("\nResult")
    failures = [*_print_learning(runs, entropy, size.largest_share), *_print_agreement(parity)]
    print("  bytes       one layer, one sequence, forward and backward, brought to rank 0 from the other:")
    for name, numbers in traffic.items():
        print(
            f"    {name:4s}  {numbers.measured:12,d} measured (ledger)  {numbers.closed_form:12,d} closed form (plan)"
        )
        if numbers.measured != numbers.closed_form:
            failures.append(f"the ledger of {name} measured {numbers.measured} bytes, not {numbers.closed_form}")
    gibibytes = {name: case_bytes(case, name) / 2**30 for name in traffic}
    computed = ", ".join(f"{name} {number:.2f} GiB" for name, number in gibibytes.items())
    print(f"    closed form only, all layers of {case.name}: {computed}")
    print(f"    from the log of the conversion: {runs['converted'].traffic}")
    return failures


def _print_learning(runs: Mapping[str, RunRecord], entropy: float, largest_share: float) -> list[str]:
    """Say how far each training came, against a model that uses no context."""
    failures = []
    print(f"  no context  entropy of the validation text's tokens: {entropy:.3f} nats/token")
    for name, run in runs.items():
        kind = "next-token loss" if name == "autoregressive" else "NELBO"
        points = ", ".join(f"{run.validation[i]:.3f} at {i}" for i in sorted(run.validation))
        print(f"  {name:15s} validation, {kind}: {points or 'missing'} nats/token")
        if not run.validation:
            failures.append(f"no evaluation in the log of {name}")
    if failures:
        return failures
    converted, scratch = (last(runs[name].validation) for name in ("converted", "from scratch"))
    if not converted < largest_share * entropy:
        failures.append(
            f"the converted model does not use context: NELBO {converted:.3f}, of single tokens {entropy:.3f}"
        )
    if not converted < scratch:
        failures.append(f"converting did not help: NELBO {converted:.3f}, from scratch {scratch:.3f}")
    return failures


def _print_agreement(parity: Mapping[str, Parity]) -> list[str]:
    """Say how far the losses of other topologies are from those of CSBP."""
    failures = []
    for name, numbers in parity.items():
        worst = max(numbers.relative_errors, default=float("nan"))
        verdict = f"largest relative difference of {len(numbers.iterations)} losses {worst:.1e}"
        print(f"  parity      CSBP and {name}: {verdict}; {'agree' if numbers.holds else 'DIFFER'}")
        if not numbers.holds:
            failures.append(f"the losses of CSBP and of {name} differ by more than {LOSS_TOLERANCE:g}: {verdict}")
    return failures


def last(losses: Mapping[int, float]) -> float:
    """Return the loss of the last iteration that has one."""
    return losses[max(losses)]
