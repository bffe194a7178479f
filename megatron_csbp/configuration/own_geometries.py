# SPDX-License-Identifier: Apache-2.0
"""What samples with geometries of their own (documents, few active blocks) need of the arguments."""

from argparse import Namespace

from megatron_csbp.configuration.changes import Change, Changes


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
    dispatcher = args.moe_token_dispatcher_type
    if args.num_experts is not None and args.pipeline_model_parallel_size > 1 and dispatcher == "allgather":
        raise ValueError(
            f"--moe-token-dispatcher-type {dispatcher} with --pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size}: samples differ in their rows, which this dispatcher does not take. "
            "Use --moe-token-dispatcher-type alltoall."
        )
    if args.context_scheme == "cp" and args.experimental_attention_variant is not None:
        raise ValueError(
            f"--context-scheme cp with --experimental-attention-variant {args.experimental_attention_variant}: "
            "samples with documents or few active blocks give ranks different numbers of rows, which the all-to-all "
            f"of these layers does not take. Use --bp-size {args.context_parallel_size} for CSBP."
        )
    block, tensor = args.diffusion_block_size, args.tensor_model_parallel_size
    if args.sequence_parallel and block % tensor:
        raise ValueError(
            f"--sequence-parallel with samples of whole blocks: --diffusion-block-size {block} must be a multiple of "
            f"--tensor-model-parallel-size {tensor}, for example {-(-block // tensor) * tensor}."
        )


def prepare_own_geometries(args: Namespace) -> list[Change]:
    """Let pipeline stages tell one another the rows of each micro-batch, since no two need have as many.

    Args:
        args: validated arguments; changed in place.

    Returns:
        The changes made, for the start summary.

    Raises:
        ValueError: see `check_own_geometries`.
    """
    check_own_geometries(args)
    changes = Changes(args)
    if args.pipeline_model_parallel_size > 1:
        changes.set("variable_seq_lengths", True, "samples differ in their rows; stages tell one another how many")
        if args.num_experts is None:
            reason = "the default of a dispatcher that a dense model never uses excludes variable_seq_lengths"
            changes.set("moe_token_dispatcher_type", "alltoall", reason)
    return changes.made
