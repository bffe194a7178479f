# SPDX-License-Identifier: Apache-2.0
"""Entry: `python -m megatron_csbp.weights import|export|check`.

    import --from HF_FOLDER --save CHECKPOINT [--mask-token ID_OR_TOKEN]
    export --load CHECKPOINT --to HF_FOLDER
    check  --from HF_FOLDER --load CHECKPOINT

Needs no GPU, no process group and little memory: about one layer and one tensor.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_csbp.errors import user_errors
from megatron_csbp.results import print_results

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def build_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_csbp.weights",
        description="Weights between Hugging Face safetensors and Megatron's torch_dist checkpoints.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("import", help="from Hugging Face to Megatron").add_argument
    add(
        "--from",
        dest="source",
        type=Path,
        required=True,
        metavar="HF_FOLDER",
        help="config.json and safetensors files",
    )
    add("--save", type=Path, required=True, metavar="CHECKPOINT", help="new folder, for --load of a training run")
    add("--mask-token", metavar="ID_OR_TOKEN", help="default: config.json's, or the first id behind the tokenizer's")
    add("--dtype", choices=DTYPES, help="of the written weights; default: the source's")
    add(
        "--make-vocab-size-divisible-by",
        type=int,
        default=8,
        metavar="N",
        help="pad the vocabulary with rows of zeros to a multiple of N, as tensor parallelism needs (default: 8); no "
        "published model needs any",
    )
    add = commands.add_parser("export", help="from Megatron to Hugging Face").add_argument
    add("--load", type=Path, required=True, metavar="CHECKPOINT", help="folder that a training run has as its --save")
    add("--to", type=Path, required=True, metavar="HF_FOLDER", help="new folder, which transformers loads")
    add("--ckpt-step", type=int, metavar="N", help="iteration; default: the latest")
    add(
        "--like",
        type=Path,
        metavar="HF_FOLDER",
        help="model with the config and tokenizer to go along; default: the one that the checkpoint was imported from",
    )
    add("--dtype", choices=DTYPES, help="of the written weights; default: the checkpoint's")
    add = commands.add_parser("check", help="compare the logits of both, on the CPU in fp32").add_argument
    add("--from", dest="source", type=Path, required=True, metavar="HF_FOLDER", help="the Hugging Face model")
    add("--load", type=Path, required=True, metavar="CHECKPOINT", help="the Megatron checkpoint")
    add("--ckpt-step", type=int, metavar="N", help="iteration; default: the latest")
    add("--prompt", nargs="+", metavar="TEXT", help="texts to compare on; default: two short ones")
    add("--tolerance", type=float, default=1e-4, help="largest allowed difference, relative to the largest logit")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = build_parser().parse_args(argv)
    status = 0
    with user_errors():
        if args.command == "import":
            from megatron_csbp.weights.importing import import_weights

            lines = import_weights(
                args.source,
                args.save,
                mask_token=args.mask_token,
                dtype=DTYPES.get(args.dtype),
                vocab_divisible_by=args.make_vocab_size_divisible_by,
            )
        elif args.command == "export":
            from megatron_csbp.weights.exporting import export_weights

            lines = export_weights(
                args.load, args.to, iteration=args.ckpt_step, like=args.like, dtype=DTYPES.get(args.dtype)
            )
        else:
            from megatron_csbp.weights.checking import check_weights

            outcome = check_weights(args.source, args.load, args.ckpt_step, args.prompt, args.tolerance)
            lines, status = outcome.lines, 0 if outcome.equal else 1
    print_results(lines)
    return status


if __name__ == "__main__":
    sys.exit(main())
