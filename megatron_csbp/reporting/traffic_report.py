# SPDX-License-Identifier: Apache-2.0
"""`--csbp-ledger`: JSON lines of what each iteration moved, and the table against the closed form at the end.

Each rank appends to a file of its own, `NAME.rank3.jsonl` for `--csbp-ledger NAME.jsonl` on rank 3. A line holds

    {"iteration": 1, "phase": "train", "rank": 3, "forward_steps": 2, "payload_bytes": ..., "remote_bytes": ...,
     "transfers": [{"layer": 1, "tensors": "clean K/V", "collective": "gather", "direction": "forward",
                    "exchanges": 2, "payload_bytes": ..., "remote_bytes": ...}, ...]}

`payload_bytes` counts all ranks' shares of the buffers, `remote_bytes` what other ranks sent to this one. `phase` is
`train`, or `evaluate` for the validation that ran since the line before.
"""

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_csbp.configuration.performance_arguments import exchange_bytes
from megatron_csbp.transformer.geometry.needs import Lowering
from megatron_csbp.transformer.geometry.plan import AttentionPlan
from megatron_csbp.transformer.traffic_ledger import (
    Collective,
    Direction,
    Entry,
    TrafficLedger,
    Volume,
    Volumes,
    total,
)

# What one layer exchanges for one micro-batch. With recomputation the second gather is that of the repeated forward
# pass, whose keys the backward pass then uses: the number is the same.
TRAINING = (
    (Collective.GATHER, Direction.FORWARD),
    (Collective.GATHER, Direction.BACKWARD),
    (Collective.REDUCE_SCATTER, Direction.BACKWARD),
)
EVALUATION = TRAINING[:1]


def closed_form(args: Namespace, plan: AttentionPlan, layer: int, *, training: bool) -> Volumes:
    """Return what one layer has to exchange for one micro-batch.

    Args:
        args: Megatron's validated arguments.
        plan: the rank's plan.
        layer: number of the layer, from 1.
        training: whether a backward pass follows.
    """
    volumes: Volumes = {}
    micro_batch_size = args.micro_batch_size if training else args.eval_micro_batch_size or args.micro_batch_size
    for copies, transfer in plan.transfers:
        for collective, direction in TRAINING if training else EVALUATION:
            payload = remote = exchange_bytes(args, plan, copies, collective, micro_batch_size)
            if transfer.lowering is Lowering.ALL_GATHER:  # its buffers hold this rank's own share too
                payload = remote * transfer.group_size // (transfer.group_size - 1)
            volumes[Entry(layer, copies, collective, direction)] = Volume(args.csbp_head_groups, payload, remote)
    return volumes


class TrafficReport:
    """Collects the ledger of one rank, writes it by iteration, and compares it with the closed form.

    Attributes:
        ledger: where the exchanges enter what they move.
    """

    def __init__(self, path: str, rank: int) -> None:
        """Open this rank's file.

        Args:
            path: value of `--csbp-ledger`.
            rank: global rank.
        """
        self.ledger = TrafficLedger()
        self._rank = rank
        self._file = ledger_path(path, rank).open("a", encoding="ascii")
        self._measured, self._expected = TrafficLedger(), TrafficLedger()
        self._training = True
        self._forward_steps = 0
        self._iterations = 0
        self._iteration = 0

    def expect_micro_batch(
        self,
        layers: Sequence[tuple[int, AttentionPlan]],
        args: Namespace,
        *,
        training: bool,
        others: Sequence[Volumes] = (),
    ) -> None:
        """Enter what a stage has to exchange for the micro-batch that it is about to run.

        Args:
            layers: number and plan of each attention layer.
            args: Megatron's validated arguments.
            training: whether a backward pass follows.
            others: what each layer without attention has to exchange.
        """
        # Validation has begun or is over; a training iteration has been written by then.
        if training != self._training:
            self._write("train" if self._training else "evaluate")
            self._training = training
        # With --skip-train there is no current iteration.
        self._iteration = getattr(args, "curr_iteration", args.iteration - 1) + 1
        self._forward_steps += 1
        forms = [closed_form(args, plan, layer, training=training) for layer, plan in layers]
        for form in (*forms, *others):
            for transfer, volume in form.items():
                self._expected.add(transfer, volume)

    def end_iteration(self, iteration: int) -> None:
        """Write the line of a training iteration that is over.

        Args:
            iteration: its number, from 1 as in Megatron's log.
        """
        self._iteration = iteration
        self._iterations += 1
        self._write("train")

    def close(self) -> None:
        """Write what is left, close the file, and print the table on rank 0, and wherever the two disagree."""
        self._write("train" if self._training else "evaluate")
        self._file.close()
        if self._rank == 0 or not self.agrees:
            print("\n".join(self.table()), flush=True)

    @property
    def agrees(self) -> bool:
        """Whether every layer has moved in each pass exactly the bytes that the closed form says.

        In how many exchanges is for the layer to choose: it may send its heads in groups.
        """
        return _bytes(self._measured.volumes) == _bytes(self._expected.volumes)

    def table(self) -> list[str]:
        """Return the lines of the table: measured against closed form, in bytes from other ranks, by kind."""
        title = f"---------------- csbp traffic of rank {self._rank}, {self._iterations} iterations with evaluations"
        lines = [f"{title} ----------------"]
        transfers = sorted(self._measured.volumes | self._expected.volumes, key=_in_order_of_time)
        kinds = dict.fromkeys((transfer.tensors, transfer.direction) for transfer in transfers)
        row = "  {:<18} {:<10} {:>10} {:>20} {:>20}".format
        lines.append(row("tensors", "pass", "exchanges", "measured bytes", "closed form bytes"))
        for kind in kinds:
            measured, expected = _of_kind(self._measured.volumes, kind), _of_kind(self._expected.volumes, kind)
            lines.append(row(*kind, measured.exchanges, f"{measured.remote_bytes:,}", f"{expected.remote_bytes:,}"))
        if not kinds:
            lines.append("  nothing is exchanged")
        layers = len({transfer.layer for transfer in self._expected.volumes})
        lines.append(
            "  closed form: 2 x K x D x itemsize x micro-batch size for each row that the plan exchanges, (P-1)/P x L "
            "rows of a copy where all is gathered, for delta nets see docs/design.md; "
            f"{layers} exchanging layers on this rank"
        )
        verdict = "agree exactly" if self.agrees else "DISAGREE"
        lines.append(f"  measured and closed form {verdict}, byte for byte in every layer")
        lines.append("-" * len(lines[0]))
        return lines

    def _write(self, phase: str) -> None:
        """Write a line of what the ledger holds, if anything ran since the last one."""
        if not self._forward_steps:
            return
        volumes = self.ledger.take()
        moved = total(volumes.values())
        line = {
            "iteration": self._iteration,
            "phase": phase,
            "rank": self._rank,
            "forward_steps": self._forward_steps,
            "payload_bytes": moved.payload_bytes,
            "remote_bytes": moved.remote_bytes,
            "transfers": [
                _as_json(transfer, volumes[transfer]) for transfer in sorted(volumes, key=_in_order_of_time)
            ],
        }
        print(json.dumps(line), file=self._file, flush=True)
        self._forward_steps = 0
        for transfer, volume in volumes.items():
            self._measured.add(transfer, volume)


def ledger_path(path: str, rank: int) -> Path:
    """Return the file of one rank: `NAME.rank3.jsonl` for `NAME.jsonl` and rank 3."""
    name = Path(path)
    return name.with_name(f"{name.stem}.rank{rank}{name.suffix}")


def _in_order_of_time(transfer: Entry) -> tuple[object, ...]:
    return transfer.layer, transfer.direction is Direction.BACKWARD, transfer.collective, transfer.copies


def _bytes(volumes: Volumes) -> dict[Entry, tuple[int, int]]:
    return {transfer: (volume.payload_bytes, volume.remote_bytes) for transfer, volume in volumes.items()}


def _of_kind(volumes: Volumes, kind: tuple[str, Direction]) -> Volume:
    """Return the sum over layers of one row of the table."""
    return total(volume for transfer, volume in volumes.items() if (transfer.tensors, transfer.direction) == kind)


def _as_json(transfer: Entry, volume: Volume) -> dict[str, Any]:
    return {
        "layer": transfer.layer,
        "tensors": transfer.tensors,
        "collective": transfer.collective,
        "direction": transfer.direction,
        "exchanges": volume.exchanges,
        "payload_bytes": volume.payload_bytes,
        "remote_bytes": volume.remote_bytes,
    }
