# SPDX-License-Identifier: Apache-2.0
"""Rules of packed documents. Imports nothing of Megatron."""

from argparse import Namespace

_NEED_PACKING = ("--loss-on", "--long-documents", "--csbp-all-blocks")


def check_packing(args: Namespace, given: frozenset[str]) -> None:
    """Packed documents come from files that mark their loss, and flags about them need `--pack-documents`."""
    strays = [flag for flag in _NEED_PACKING if flag in given]
    if strays and not args.pack_documents:
        raise ValueError(
            f"{', '.join(strays)} given without --pack-documents, which makes samples of whole documents; add it, or "
            "drop the flag."
        )
    if args.pack_documents and args.eod_mask_loss:
        raise ValueError(
            "--eod-mask-loss with --pack-documents: which tokens of a document carry loss is said by PREFIX.loss.bin, "
            "its end included; leave --eod-mask-loss out, and mark the end with 0 there if it is not to be learnt."
        )
    if args.pack_documents and args.mock_data:
        raise ValueError("--pack-documents with --mock-data: mock data have no documents; use --data-path PREFIX.")
