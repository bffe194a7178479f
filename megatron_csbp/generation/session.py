# SPDX-License-Identifier: Apache-2.0
"""From a command line to a loaded model and a decoder.

Import it after the CPU runtime is installed: it needs Megatron.
"""

import contextlib
import io
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_csbp import arguments, megatron_arguments, megatron_compat, megatron_loading, megatron_start
from megatron_csbp.configuration.checkpoint_defaults import named_checkpoint, set_defaults_from_checkpoint
from megatron_csbp.configuration.checkpoint_rules import check_files
from megatron_csbp.configuration.config_file import set_defaults_from_yaml, take_yaml_flag
from megatron_csbp.configuration.runtime_arguments import adapt_to_runtime
from megatron_csbp.cpu_runtime import RuntimeInfo
from megatron_csbp.errors import say_errors_in_one_line
from megatron_csbp.generation.arguments import add_arguments, check, uncover_rule
from megatron_csbp.generation.decoding import AutoregressiveDecoder, BlockDecoder, BlockStep, Generated, TokenChoice
from megatron_csbp.generation.prefix_model import CachedPrefixModel, load_model


def parse_arguments(runtime: RuntimeInfo) -> Namespace:
    """Return Megatron's validated arguments, with those of the checkpoint as defaults.

    Args:
        runtime: the device that was chosen.

    Raises:
        ValueError: a rule is broken; on every rank, before any collective.
    """
    yaml_path, sys.argv[1:] = take_yaml_flag(sys.argv[1:])
    saved = named_checkpoint(sys.argv[1:])

    def add_flags(parser: ArgumentParser) -> ArgumentParser:
        arguments.add_arguments(parser)
        add_arguments(parser)
        megatron_arguments.make_help_printable(parser)
        say_errors_in_one_line(parser)
        if saved is not None:
            set_defaults_from_checkpoint(parser, saved)
        if yaml_path is not None:
            set_defaults_from_yaml(parser, yaml_path)
        return parser

    def before(args: Namespace) -> None:
        check(args)
        adapt_to_runtime(args, runtime)
        args.micro_batch_size = 1
        args.sequence_parallel = False
        # Weights only; a checkpoint that cannot be read ends the command.
        args.finetune = args.no_load_optim = args.no_load_rng = args.exit_on_missing_checkpoint = True

    return megatron_arguments.parse_and_validate_arguments(add_flags, {}, check_files, before, lambda args: None)


@contextlib.contextmanager
def without_megatrons_chatter() -> Any:
    """Drop what Megatron prints of its set-up; warnings and errors stay."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


@dataclass(frozen=True)
class Session:
    """A loaded model and how it is to be decoded.

    Attributes:
        args: Megatron's validated arguments.
        tokenizer: Megatron's tokenizer.
        prompts: token ids of each prompt.
        model: on this rank.
    """

    args: Namespace
    tokenizer: Any
    prompts: list[list[int]]
    model: CachedPrefixModel

    @classmethod
    def open(cls, args: Namespace) -> "Session":
        """Read the prompts and load the model.

        Raises:
            ValueError: a prompt cannot be read or is too long; before any collective.
        """
        tokenizer = megatron_loading.tokenizer()
        prompts = [list(tokenizer.tokenize(text)) for text in _prompts(args)]
        _check_lengths(args, prompts)
        megatron_compat.ensure_dataset_helpers()
        megatron_loading.initialize_megatron()
        return cls(args, tokenizer, prompts, load_model(args))

    def write(self, prompt: list[int], on_step: Callable[[BlockStep], None] | None = None) -> Generated:
        """Write behind a prompt, on every rank together.

        Args:
            prompt: token ids.
            on_step: called after each pass over a block.
        """
        args = self.args
        block = args.diffusion_block_size if args.decoding == "block" else 1
        forbidden = [] if args.mask_token_id is None else [args.mask_token_id]
        choose = TokenChoice(self.tokenizer.vocab_size, forbidden, args.temperature, args.seed)
        decoder: BlockDecoder | AutoregressiveDecoder = AutoregressiveDecoder(choose)
        if args.decoding == "block":
            decoder = BlockDecoder(
                block_size=block,
                mask_token_id=args.mask_token_id,
                shifts_targets=args.token_shift,
                choose=choose,
                rule=uncover_rule(args),
                on_step=on_step,
            )
        self.model.restart(capacity=-(-(len(prompt) + args.max_new_tokens) // block) * block)
        return decoder(self.model, prompt, args.max_new_tokens, megatron_start.eod_token_id())


def _prompts(args: Namespace) -> list[str]:
    """Return the texts to continue."""
    prompts = list(args.prompt or [])
    if args.prompt_file is not None:
        try:
            prompts.append(Path(args.prompt_file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--prompt-file {args.prompt_file} cannot be read as UTF-8 text: {error}.") from error
    return prompts


def _check_lengths(args: Namespace, prompts: list[list[int]]) -> None:
    """A row predicts the first token, and learned position embeddings do not end before the last."""
    needs_a_token = args.decoding == "autoregressive" or args.token_shift
    if needs_a_token and not all(prompts):
        raise ValueError("--prompt has no token, but each token is predicted from the one before; give some text.")
    longest = max(len(prompt) for prompt in prompts) + args.max_new_tokens
    if args.position_embedding_type == "learned_absolute" and longest > args.max_position_embeddings:
        raise ValueError(
            f"--max-new-tokens {args.max_new_tokens}: prompt and text have {longest} tokens, but the checkpoint has "
            f"{args.max_position_embeddings} position embeddings; use a shorter prompt or fewer tokens."
        )
