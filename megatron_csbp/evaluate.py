# SPDX-License-Identifier: Apache-2.0
"""Entry: `python -m megatron_csbp.evaluate --load CHECKPOINTS --text FILE ...`, or torchrun for more ranks.

Runs the training entry's own evaluation (`--skip-train`) over a whole text or dataset, with the same noise every time,
and prints one line: NELBO, and the autoregressive perplexity where the objective has such a loss. Model, tokenizer and
objective are those of the checkpoint; every flag of training may be given, `--valid-data-path` instead of `--text`.
"""

import contextlib
import logging
import math
import os
import sys
import tempfile
import warnings
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from megatron_csbp.results import check_json_file, print_results, write_json

_DEFAULTS = (
    "--skip-train --finetune --no-load-optim --no-load-rng --exit-on-missing-checkpoint --micro-batch-size 1 "
    "--train-iters 1 --eval-interval 1 --eval-iters 1 --full-validation --multiple-validation-sets --num-workers 0"
)
_NAMES = {"nelbo": "nelbo", "ar loss": "ar_loss", "lm loss": "lm_loss"}
"""What training reports, and what it is called here."""


def main() -> None:
    """Evaluate and print."""
    from megatron_csbp import cpu_runtime
    from megatron_csbp.arguments import is_block_diffusion, read_device
    from megatron_csbp.errors import user_errors
    from megatron_csbp.one_process import be_the_only_rank

    be_the_only_rank()
    warnings.simplefilter("ignore")  # dozens about packages that are not installed
    own, argv = _own_flags(sys.argv[1:])
    with tempfile.TemporaryDirectory() as scratch:
        with user_errors():
            if own.json is not None:
                check_json_file(own.json)
            runtime = cpu_runtime.install(read_device(argv))  # type: ignore[arg-type]

            from megatron_csbp import autoregressive, megatron_compat, megatron_loading, pretrain_gpt, training_setup
            from megatron_csbp.configuration.checkpoint_defaults import named_checkpoint, set_defaults_from_checkpoint

            megatron_compat.check_megatron_version()
            megatron_compat.ensure_dataset_helpers()
            saved = named_checkpoint(argv)
            assert saved is not None, "--help has ended the command"
            if own.text:
                argv += ["--valid-data-path", _prepared(own.text, saved, argv, Path(scratch))]
            sys.argv[1:] = [*_DEFAULTS.split(), *argv]
            _log_to_stderr()
            with contextlib.redirect_stdout(sys.stderr):
                args = training_setup.parse_and_validate_args(
                    runtime, set_defaults=lambda parser: set_defaults_from_checkpoint(parser, saved)
                )
            if not is_block_diffusion(args):
                autoregressive.check_supported(args)
        with contextlib.redirect_stdout(sys.stderr), megatron_loading.recorded_evaluations() as evaluations:
            pretrain_gpt.run(args)
    with user_errors():
        _report(args, evaluations, own.json)


def _own_flags(argv: list[str]) -> tuple[Namespace, list[str]]:
    """Take the flags of this command out of a command line; return them, and the rest."""
    parser = ArgumentParser(
        prog="python -m megatron_csbp.evaluate",
        description="NELBO and autoregressive perplexity of a checkpoint on a text. Every flag of "
        "megatron_csbp.pretrain_gpt may be given too; its --help lists them.",
        allow_abbrev=False,
    )
    parser.add_argument("--text", nargs="+", default=[], metavar="PATH", help="text files, JSONL files or folders")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the figures to FILE")
    return parser.parse_known_args(argv)


def _prepared(texts: list[str], saved: Namespace, argv: list[str], folder: Path) -> str:
    """Tokenize texts as for training; return the prefix of the dataset.

    Raises:
        ValueError: more than one rank, no such tokenizer, or a text that cannot be read.
    """
    from megatron_csbp.data import prepare
    from megatron_csbp.data.text_tokenizer import load_tokenizer

    if os.environ["WORLD_SIZE"] != "1":
        raise ValueError(
            f"--text {texts[0]} on {os.environ['WORLD_SIZE']} ranks, which would each tokenize it; prepare it once "
            "with python -m megatron_csbp.data.prepare, and give --valid-data-path PREFIX."
        )
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tokenizer-model", default=saved.tokenizer_model)
    tokenizer = parser.parse_known_args(argv)[0].tokenizer_model
    if tokenizer is None:
        raise ValueError(
            "--text needs a Hugging Face tokenizer, and the checkpoint was trained with --tokenizer-type "
            f"{saved.tokenizer_type}; give --valid-data-path PREFIX of prepared data."
        )
    prefix = str(folder / "text")
    command = ["--input", *texts, "--tokenizer", tokenizer, "--output-prefix", prefix]
    if load_tokenizer(tokenizer).eod_id is not None:
        command.append("--append-eod")
    prepare.prepare(prepare.build_parser().parse_args(command))
    return prefix


def _log_to_stderr() -> None:
    """Megatron's log goes to standard output, which is for the result."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)


def _report(args: Namespace, evaluations: list[dict[str, Any]], json_file: Path | None) -> None:
    """Print one line and write the JSON, on the last rank, which has the sums."""
    if args.rank != args.world_size - 1:
        return
    is_autoregressive = args.diffusion_block_size is None
    (evaluation,) = evaluations
    losses = evaluation["losses"]
    figures: dict[str, Any] = {_NAMES[name]: value for name, value in losses.items() if name in _NAMES}
    words = []
    if is_autoregressive:
        figures["ar_loss"] = losses["lm loss"]
    else:
        words.append(f"NELBO {figures['nelbo']:.4f} nats/token")
    if "ar_loss" in figures:
        figures["ar_perplexity"] = math.exp(figures["ar_loss"])
        words.append(f"AR loss {figures['ar_loss']:.4f} nats/token, perplexity {figures['ar_perplexity']:.3f}")
    length = args.seq_length if is_autoregressive else args.clean_seq_length
    figures |= {"samples": evaluation["samples"], "tokens_per_sample": length, "checkpoint": args.load}
    try:
        print_results([f"{', '.join(words)}; {figures['samples']} samples of {length} tokens; {args.load}"])
    finally:  # also where the reader of the line has gone
        if json_file is not None:
            write_json(json_file, figures)


if __name__ == "__main__":
    main()
