# SPDX-License-Identifier: Apache-2.0
"""Entry: `python -m megatron_csbp.tools.gpu_check [--device cpu] [--json FILE] [--lengths L ...] [--backends B ...]`.

On one GPU, in minutes: every attention backend against fp64, times, peak memory, and a training step. A table comes
last. The exit status is 0 only if nothing was wrong, and 2 if there is no GPU to check.
"""

import argparse
import contextlib
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megatron_csbp.results import check_json_file, print_results, write_json
from megatron_csbp.tools.gpu_check.accuracy import ALLOWED_RATIO, check_accuracy
from megatron_csbp.tools.gpu_check.report import Report, environment
from megatron_csbp.tools.gpu_check.settings import Settings, full_form, reduced_form
from megatron_csbp.tools.gpu_check.tile_table import time_each_tile
from megatron_csbp.tools.gpu_check.timing import time_backend, time_dense_flex
from megatron_csbp.tools.gpu_check.training_step import training_step
from megatron_csbp.transformer.kernels import AttentionKernel, HeadShape, checked_kernel
from megatron_csbp.transformer.kernels.local_interface import LocalKernel


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check and return the exit status.

    Args:
        arguments: command line; that of the process by default.
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        check_json_file(args.json)
    except ValueError as error:
        parser.error(str(error))
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            f"megatron_csbp.tools.gpu_check: no CUDA device (torch {torch.__version__}, built for CUDA "
            f"{torch.version.cuda}). Run it on a GPU, with a CUDA build of PyTorch and the driver visible "
            "(nvidia-smi), or try its reduced form, which checks no GPU kernel, with --device cpu.",
            file=sys.stderr,
        )
        return 2
    lengths = tuple(args.lengths) if args.lengths else None
    settings = reduced_form(lengths) if args.device == "cpu" else full_form(torch.device("cuda", 0), lengths)
    if args.backends:
        settings = replace(settings, backends=tuple(args.backends))
    report = run(settings, args.json, with_training=not args.skip_training)
    print_results(report.lines())
    return 1 if report.errors else 0


def run(settings: Settings, file: Path, *, with_training: bool = True) -> Report:
    """Check every backend; a failure is noted and the rest goes on.

    Args:
        settings: where and at which sizes.
        file: gets the results as JSON after each part, so that a check that is cut short leaves what it found.
        with_training: whether to run the training step too.
    """
    started = time.perf_counter()
    report = Report(environment(settings.device))
    for name in settings.backends:
        if name == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
            report.skipped[name] = "Transformer Engine is not installed; docs/gpu.md says how"
            continue
        with _noting(report, name):
            _check_backend(report, settings, name)
        _write(report, file, started)
    if settings.device.type == "cuda":
        for length in settings.timing_lengths:
            with _noting(report, f"FlexAttention on both copies, L = {length}"):
                _progress(f"FlexAttention on both copies of {length} tokens")
                report.timings.append(time_dense_flex(settings, length))
            _write(report, file, started)
    if with_training:
        _progress("a training step through Megatron")
        report.training = training_step(settings)
        if report.training.error:
            report.errors.append(report.training.error)
    _write(report, file, started)
    return report


def _write(report: Report, file: Path, started: float) -> None:
    report.seconds = time.perf_counter() - started
    write_json(file, report.as_json())


def _check_backend(report: Report, settings: Settings, name: str) -> None:
    heads = settings.accuracy_heads
    kernel = _kernel(settings, name, heads)
    for accuracy in check_accuracy(kernel, settings):
        _progress(
            f"{name}: {accuracy.scheme}, P = {accuracy.group_size}, {accuracy.clean_attention}: {accuracy.ratio}"
        )
        report.accuracy.append(accuracy)
        if not accuracy.passed:
            report.errors.append(
                f"{name}: {accuracy.worst_part} of {accuracy.scheme}, P = {accuracy.group_size}, "
                f"{accuracy.clean_attention} clean attention errs {accuracy.ratio} times as much as dense bf16; "
                f"{ALLOWED_RATIO:g} is allowed"
            )
    for length in settings.timing_lengths:
        _progress(f"{name}: times at {length} tokens")
        with _noting(report, f"{name}, L = {length}"):
            kernel = _kernel(settings, name, settings.timing_heads)
            report.timings.extend(time_backend(kernel, settings, length))
            if not isinstance(kernel, LocalKernel):
                report.tiles.extend(time_each_tile(kernel, settings, length))


def _kernel(settings: Settings, name: str, heads: HeadShape) -> AttentionKernel:
    return checked_kernel(name, settings.device, torch.bfloat16, heads)


@contextlib.contextmanager
def _noting(report: Report, what: str) -> Iterator[None]:
    """Turn an exception into a line of the report, and free what the failed part held."""
    try:
        yield
    except Exception as error:
        report.errors.append(f"{what}: {type(error).__name__}: {error}")
    finally:
        # FlexAttention is compiled for each length, and PyTorch allows a function only a few such compilations.
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _progress(text: str) -> None:
    print(f"gpu_check: {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megatron_csbp.tools.gpu_check", description="Check one GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a reduced form.")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", default=Path("gpu_check.json"), help="Where to write the results."
    )
    parser.add_argument("--lengths", type=int, nargs="+", help="Sequence lengths of the timings.")
    parser.add_argument("--backends", nargs="+", choices=("transformer_engine", "torch", "flex", "hybrid"))
    parser.add_argument("--skip-training", action="store_true", help="Leave out the training step.")
    return parser


if __name__ == "__main__":
    sys.exit(main())
