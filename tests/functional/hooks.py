# SPDX-License-Identifier: Apache-2.0
"""What can go wrong in a run, as hooks of `tests.support.recorded_entry`: called on every rank before the entry."""

import functools
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.mlp import MLP
from megatron.training import checkpointing

from megatron_csbp import arguments, forward_step, megatron_arguments, megatron_checkpoints, training_setup, versions
from megatron_csbp.agreement import failures
from megatron_csbp.objectives import block_diffusion, nemotron
from megatron_csbp.objectives.interface import BoolArray, CleanRows, FloatArray
from megatron_csbp.objectives.noise import SampleNoise
from megatron_csbp.transformer.geometry.rows import RankRows
from megatron_csbp.transformer.geometry.sample import Sample, packed_documents


def mask_nothing_on_the_last_rank() -> None:
    """Draw noise that masks no token on the last rank."""
    if is_last_rank():
        _keep(lambda rows: np.ones(rows.num_rows, dtype=np.bool_))


def mask_nothing_in_two_blocks() -> None:
    """Draw noise that masks no token in blocks 0 and 5."""
    _keep(lambda rows: np.isin(rows.sample_positions // rows.sample.block_size, (0, 5)))


def mask_nothing_in_odd_samples() -> None:
    """Draw noise that masks no token of every second sample, which is every second micro-batch of one sequence."""
    calls = iter(range(10**9))
    _keep(lambda rows: np.full(rows.num_rows, next(calls) % 2 == 1))


def mask_nothing() -> None:
    """Draw noise that masks no token at all."""
    _keep(lambda rows: np.ones(rows.num_rows, dtype=np.bool_))


def die_in_the_third_iteration() -> None:
    """Kill the last rank, as the kernel does when memory runs out."""
    failures._ANSWERS_S = 4.0  # for which the others wait in vain
    if is_last_rank():
        _at_micro_batch(3, lambda weights_BS: os.kill(os.getpid(), signal.SIGKILL))


def raise_in_the_third_iteration() -> None:
    """Let the last rank fail by itself."""
    if is_last_rank():
        _at_micro_batch(3, _fail)


def _fail(weights_BS: Any) -> None:
    raise ValueError("a broken sample")


def hang_in_the_third_iteration() -> None:
    """Let the last rank hang, and collectives wait for 15 seconds only."""
    parse = megatron_arguments.parse_and_validate_arguments

    @functools.wraps(parse)
    def impatient(*positional: Any) -> Any:
        args = parse(*positional)
        args.distributed_timeout_minutes = 0.25
        return args

    megatron_arguments.parse_and_validate_arguments = impatient
    if is_last_rank():
        _at_micro_batch(3, lambda weights_BS: time.sleep(600))


def die_in_the_third_backward_pass() -> None:
    """Kill the last rank as its third backward pass begins."""
    if is_last_rank():
        step = schedules.backward_step
        calls = iter(range(1, 10**9))

        @functools.wraps(step)
        def backward_step(*positional: Any, **keywords: Any) -> Any:
            if next(calls) >= 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*positional, **keywords)

        schedules.backward_step = backward_step


def die_in_the_second_checkpoint() -> None:
    """Kill the last rank in the middle of its second checkpoint, once in a job: files are there, and end early."""
    failures._ANSWERS_S = 4.0
    if is_last_rank() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        _at_save(2, _write_half_and_die)


def _write_half_and_die(folder: Path) -> None:
    (folder / "__1_0.distcp").write_bytes(bytes(1000))
    for child in psutil.Process().children(recursive=True):  # as a scheduler would: they hold the output open
        child.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def fill_the_disk_in_the_second_checkpoint() -> None:
    """Let no file of the last rank grow beyond 20 kB from its second checkpoint on."""
    if is_last_rank():
        _at_save(2, lambda folder: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY)))


def _at_save(number: int, act: Callable[[Path], object]) -> None:
    """Act in the folder of a checkpoint that is about to be written."""
    save = checkpointing.dist_checkpointing.save
    calls = iter(range(1, 10**9))

    @functools.wraps(save)
    def saved(state: Any, checkpoint: Any, *positional: Any, **keywords: Any) -> Any:
        if next(calls) == number:
            Path(checkpoint).mkdir(parents=True, exist_ok=True)
            act(Path(checkpoint))
        return save(state, checkpoint, *positional, **keywords)

    checkpointing.dist_checkpointing = SimpleNamespace(**vars(checkpointing.dist_checkpointing) | {"save": saved})


def nan_from_the_third_iteration() -> None:
    """Make the last rank's loss NaN."""
    if is_last_rank():
        _at_micro_batch(3, lambda weights_BS: weights_BS.fill_(float("nan")))


def samples_of_documents_with_few_active_blocks() -> None:
    """Give every sample documents of its own, and corrupted rows in about a fifth of its blocks."""
    training_setup.sample_of_from_args = lambda args: functools.partial(
        _sample_of_documents, arguments.static_sample(args)
    )


def _sample_of_documents(static: Sample, index: int) -> Sample:
    draws = np.random.default_rng(index)
    lengths: list[int] = []
    start = 0
    while start < static.length:
        lengths.append(int(draws.integers(1, static.length - start + 1)))
        start += -(-lengths[-1] // static.block_size) * static.block_size
    active = draws.random((static.num_views, static.num_blocks)) < 0.2
    active[0, draws.integers(static.num_blocks)] = True
    documents = packed_documents(lengths, static.block_size)
    return Sample(static.length, static.block_size, static.num_views, documents, active)


def start_otherwise_on_rank_1() -> None:
    """Let rank 1 have another learning rate, seed and NumPy."""
    if os.environ["RANK"] == "1":
        sys.argv += ["--lr", "0.001", "--seed", "8"]
        package_version = versions.package_version
        versions.package_version = lambda name: "1.26.0" if name == "numpy" else package_version(name)


def start_with_another_size_on_rank_1() -> None:
    """Let rank 1 be of a job with another tensor-parallel size, with which it would make other groups."""
    if os.environ["RANK"] == "1":
        sys.argv += ["--tensor-model-parallel-size", "2", "--context-parallel-size", "1", "--bp-size", "1"]


def is_last_rank() -> bool:
    return int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1


def _keep(kept: Callable[[RankRows], BoolArray]) -> None:
    """Leave these rows unmasked, whatever the noise says."""
    for module in (block_diffusion, nemotron):
        draw = module.masked_rows

        @functools.wraps(draw)
        def masked_rows(
            clean: CleanRows,
            noises: Sequence[SampleNoise],
            rows: RankRows,
            move_chance: FloatArray | float,
            draw: Callable[..., BoolArray] = draw,
        ) -> BoolArray:
            return draw(clean, noises, rows, move_chance) & ~kept(rows)

        module.masked_rows = masked_rows


def _at_micro_batch(first: int, act: Callable[[Any], object]) -> None:
    """Act on the loss weights of a micro-batch and of all that follow."""
    select = forward_step.select_loss_rows
    calls = iter(range(1, 10**9))

    @functools.wraps(select)
    def select_loss_rows(targets_BS: Any, weights_BS: Any, is_corrupted_S: Any) -> Any:
        if next(calls) >= first:
            act(weights_BS)
        return select(targets_BS, weights_BS, is_corrupted_S)

    forward_step.select_loss_rows = select_loss_rows


def keep_the_last_layer_whole() -> None:
    """Let the last layer compute clean rows to the end, whatever the objective."""
    training_setup.why_last_layer_is_whole = lambda *args, **options: "a test wants it"


def tell_the_rows_of_every_mlp() -> None:
    """Print how many rows each MLP is given in training."""
    forward = MLP.forward

    @functools.wraps(forward)
    def tell(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            print(f"MLP of {hidden_states.shape[0]} rows")
        return forward(self, hidden_states, *args, **kwargs)

    MLP.forward = tell


def forget_the_saved_biases() -> None:
    """Let a checkpoint's arguments say nothing of biases, as those of another tool."""
    read = megatron_checkpoints.common_state

    def forgetful(path: Path) -> dict[str, Any]:
        state = dict(read(path))
        del state["args"].add_qkv_bias
        return state

    megatron_checkpoints.common_state = forgetful


def forget_the_launcher() -> None:
    """Leave what torchrun would not have set."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
