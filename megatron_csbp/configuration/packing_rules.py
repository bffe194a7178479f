# SPDX-License-Identifier: Apache-2.0
"""Rules of samples with geometries of their own: packed documents, few active blocks. Imports nothing of Megatron."""

from argparse import Namespace

_NEED_PACKING = ("--loss-on", "--long-documents", "--csbp-all-blocks")


def check_packing(args: Namespace, given: frozenset[str]) -> None:
    """Packed documents come from files, and flags about them need `--pack-documents`."""
    strays = [flag for flag in _NEED_PACKING if flag in given]
    if strays and not args.pack_documents:
        raise ValueError(
            f"{', '.join(strays)} given without --pack-documents, which makes samples of whole documents; add it, or "
            "drop the flag."
        )
    if args.pack_documents and args.mock_data:
        raise ValueError("--pack-documents with --mock-data: mock data have no documents; use --data-path PREFIX.")


def check_own_geometries(args: Namespace) -> None:
    """Samples with geometries of their own come one by one, and their rows divide among tensor-parallel ranks."""
    for flag, size in (
        ("--micro-batch-size", args.micro_batch_size),
        ("--eval-micro-batch-size", args.eval_micro_batch_size),
    ):
        if size not in (None, 1):
            raise ValueError(
                f"{flag} {size}: samples with documents or few active blocks differ in their rows, so a micro-batch "
                f"is one of them. Use {flag} 1."
            )
    block, tensor = args.diffusion_block_size, args.tensor_model_parallel_size
    if args.sequence_parallel and block % tensor:
        raise ValueError(
            f"--sequence-parallel with samples of whole blocks: --diffusion-block-size {block} must be a multiple of "
            f"--tensor-model-parallel-size {tensor}, for example {-(-block // tensor) * tensor}."
        )
