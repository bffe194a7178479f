# SPDX-License-Identifier: Apache-2.0
"""Compares the curves of the demo, counts bytes, and says what came out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sizes import BLOCK_SIZE, NUM_RANKS, Size, TrafficCase
from training import DemoError, RunRecord

from megatron_csbp.transformer.geometry.layer_plans import layer_plans
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Scheme, Sharding
from megatron_csbp.transformer.geometry.transfers import row_bytes
from megatron_csbp.transformer.geometry.visibility import CleanAttention, Mask

LOSS_TOLERANCE = 2e-6
"""Largest relative difference of two losses that still counts as parity; the log has 7 digits of them."""

LARGEST_SHARE = 0.95
"""The last tenth of the training losses must be below this share of the first tenth."""

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
    def measure(cls, scheme: str, size: Size, ledger: Path) -> "Traffic":
        """Read the first training iteration of a run's ledger, and compute the closed form beside it.

        Raises:
            DemoError: there is no such ledger, or it has no training iteration.
        """
        lines = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.is_file() else []
        trained = [line for line in lines if line["phase"] == "train"]
        if not trained:
            raise DemoError(f"{ledger} has no line of a training iteration.")
        measured = trained[0]["remote_bytes"] // (size.layers * size.micro_batches)
        sample, sharding = Sample(size.sequence_length, BLOCK_SIZE), Sharding(NUM_RANKS, _SCHEMES[scheme])
        per_row = row_bytes(size.key_value_heads, size.head_dim, FP32_BYTES)
        return cls(bytes_per_layer(sample, sharding, per_row), measured)


def bytes_per_layer(sample: Sample, sharding: Sharding, bytes_per_row: int) -> int:
    """Return the plan's closed form of what a layer brings rank 0, in forward and backward, for one sequence."""
    plan = layer_plans(sample, sharding, 0).plan(Mask(CleanAttention.BLOCK_CAUSAL))
    return PASSES * sum(transfer.gather_bytes(bytes_per_row) for _, transfer in plan.transfers)


def case_bytes(case: TrafficCase, scheme: str) -> int:
    """Return the closed form for all layers of a case."""
    sample, sharding = Sample(case.sequence_length, case.block_size), Sharding(case.num_ranks, _SCHEMES[scheme])
    per_row = row_bytes(case.key_value_heads, case.head_dim, case.itemsize)
    return case.layers * bytes_per_layer(sample, sharding, per_row)


def mean_of_ends(losses: Sequence[float]) -> tuple[float, float]:
    """Return the mean loss of the first and of the last tenth of a run."""
    count = max(1, len(losses) // 10)
    return sum(losses[:count]) / count, sum(losses[-count:]) / count


def print_parity(parity: Parity) -> None:
    """Print the losses of both topologies side by side."""
    print("\nThe same iterations on one rank and with CSBP on two (lm loss, all digits that Megatron logs)")
    print("  iteration     one rank         CSBP   relative difference")
    rows = zip(parity.iterations, parity.reference, parity.sharded, parity.relative_errors, strict=True)
    for iteration, one, two, error in rows:
        print(f"  {iteration:9d}  {one:11.6f}  {two:11.6f}   {error:.1e}")


def print_summary(
    size: Size, run: RunRecord, parity: Mapping[str, Parity], traffic: Mapping[str, Traffic], case: TrafficCase
) -> list[str]:
    """Print what came out, and return what failed, a sentence each."""
    failures = []
    print("\nResult")
    for name, numbers in parity.items():
        worst = max(numbers.relative_errors, default=float("nan"))
        verdict = f"largest relative difference of {len(numbers.iterations)} losses {worst:.1e}"
        print(f"  parity      CSBP and {name}: {verdict}; {'agree' if numbers.holds else 'DIFFER'}")
        if not numbers.holds:
            failures.append(f"the losses of CSBP and of {name} differ by more than {LOSS_TOLERANCE:g}: {verdict}")
    first, last = mean_of_ends([run.losses[i] for i in sorted(run.losses)])
    print(f"  loss        {first:.3f} -> {last:.3f} nats/token (means of the first and the last tenth)")
    if not last < LARGEST_SHARE * first:
        failures.append(f"the loss did not fall clearly: {first:.3f} -> {last:.3f}")
    if run.nelbos:
        points = ", ".join(f"{run.nelbos[i]:.3f} at {i}" for i in sorted(run.nelbos))
        print(f"  validation  NELBO {points} (nats/token; the same samples and masks each time)")
    else:
        failures.append("no evaluation in the log")
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
    print(f"    from the log of the run: {run.traffic}")
    return failures


def draw(run: RunRecord, parity: Parity, path: Path) -> None:
    """Draw the training curve, the validation NELBO and the difference of the two topologies."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, errors) = pyplot.subplots(
        2, 1, figsize=(8, 7), height_ratios=(2, 1), layout="constrained", sharex=True
    )
    iterations = sorted(run.losses)
    losses = [run.losses[i] for i in iterations]
    curves.plot(iterations, losses, color="tab:blue", alpha=0.3, linewidth=1, label="CSBP, 2 ranks: each iteration")
    curves.plot(iterations, smoothed(losses), color="tab:blue", label="CSBP, 2 ranks: smoothed")
    curves.plot(parity.iterations, parity.reference, "x", color="tab:red", label="one rank: the first iterations")
    evaluated = sorted(run.nelbos)
    curves.plot(evaluated, [run.nelbos[i] for i in evaluated], "o", color="tab:green", label="validation NELBO")
    curves.set_ylabel("nats per token")
    curves.set_title("Block diffusion on the sources of Python's standard library")
    curves.legend()
    curves.grid(alpha=0.3)
    # A difference of 0 has no place on a logarithmic axis.
    floor = 1e-8
    shown = [max(error, floor) for error in parity.relative_errors]
    errors.semilogy(parity.iterations, shown, "x-", color="tab:red")
    errors.axhline(LOSS_TOLERANCE, color="black", linestyle="--", linewidth=1, label=f"tolerance {LOSS_TOLERANCE:g}")
    errors.set_ylim(floor / 2, 1e-5)
    errors.set_ylabel("|CSBP - one rank| / one rank\n(0 is drawn at 1e-8)")
    errors.set_xlabel("iteration")
    errors.legend()
    errors.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def smoothed(values: Sequence[float], keep: float = 0.85) -> list[float]:
    """Return the exponential moving average, corrected for its start."""
    averages, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        averages.append(total / weight)
    return averages
