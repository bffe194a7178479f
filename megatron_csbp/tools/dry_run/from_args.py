# SPDX-License-Identifier: Apache-2.0
"""From Megatron's validated arguments to a `Job`."""

from argparse import Namespace
from collections.abc import Sequence

import torch

from megatron_csbp import arguments, megatron_delta_net, megatron_model
from megatron_csbp.configuration.changes import Change
from megatron_csbp.configuration.objective_flags import objective_from_args
from megatron_csbp.configuration.performance_arguments import GRAD_REDUCE_ITEMSIZES
from megatron_csbp.tools.dry_run.job import Job
from megatron_csbp.tools.dry_run.loss_rows import loss_rows
from megatron_csbp.tools.dry_run.network import Experts, Layer, LayerKind, Network
from megatron_csbp.tools.dry_run.packed_data import read_packed_samples
from megatron_csbp.tools.dry_run.topology import Layers, Precision, Recompute, Topology
from megatron_csbp.transformer.delta_net.traffic import DeltaNetSizes
from megatron_csbp.transformer.geometry.scheme import BlockAssignment, Scheme
from megatron_csbp.transformer.geometry.visibility import CleanAttention, WindowAnchor

_MOMENTS = {"adam": 2, "sgd": 1}
"""Moments that an optimizer keeps of each parameter."""


def job_from_args(args: Namespace, config: object, changes: Sequence[Change]) -> Job:
    """Return the job that a command line describes.

    Args:
        args: validated arguments.
        config: Megatron's `TransformerConfig`.
        changes: what was changed among the arguments because this process has no GPU.

    Raises:
        ValueError: the planner has no model of something that is asked for.
    """
    _refuse_what_has_no_model(args)
    network = network_from_args(args)
    packed = read_packed_samples(args) if args.pack_documents else None
    expected, most = loss_rows(args, args.clean_seq_length)
    return Job(
        network=network,
        topology=_topology(args),
        length=args.clean_seq_length,
        block_size=args.diffusion_block_size,
        views=args.corrupted_views,
        clean_attention=CleanAttention(args.clean_attention),
        window_anchor=WindowAnchor(args.window_anchor),
        micro_batch=args.micro_batch_size,
        global_batch=args.global_batch_size,
        iterations=args.train_iters or 0,
        loss_rows=expected if packed is None else packed.median.loss_rows,
        most_loss_rows=most if packed is None else packed.median.most_loss_rows,
        packed=packed,
        excludes_mask=objective_from_args(args).excludes_mask_logit,
        recompute=_recompute(args),
        precision=_precision(args),
        layers=_layers(args, changes),
        stages=_stages(args, config),
        head_groups=args.csbp_head_groups,
        chunk_rows=args.csbp_loss_chunk_rows,
        drops_clean_rows=args.csbp_whole_last_layer is None,
        distributed_optimizer=args.use_distributed_optimizer,
        overlaps_gradients=args.overlap_grad_reduce,
        overlaps_weights=args.overlap_param_gather,
        dropout=bool(args.hidden_dropout),
        state_bytes=args.csbp_delta_net_state_mib * 2**20,
        delta_net_kernel="torch" if args.device == "cpu" or args.csbp_delta_net_backend == "torch" else "fla",
    )


def _refuse_what_has_no_model(args: Namespace) -> None:
    if args.optimizer not in _MOMENTS:
        raise ValueError(
            f"--optimizer {args.optimizer} is not planned: what its state takes has no formula here; plan with "
            f"--optimizer {' or '.join(_MOMENTS)}, or check the job alone with --csbp-dry-run {args.world_size}."
        )
    for flag, is_on in (
        ("--cpu-offloading-num-layers", args.cpu_offloading_num_layers),
        ("--fine-grained-activation-offloading", args.fine_grained_activation_offloading),
        ("--fp8-format", args.fp8),
    ):
        if is_on:
            raise ValueError(
                f"{flag} is not planned: what it changes has no formula here; plan without it, or check the job alone "
                f"with --csbp-dry-run {args.world_size}."
            )


def network_from_args(args: Namespace) -> Network:
    """Return the sizes of the model."""
    return Network(
        layers=_network_layers(args),
        hidden=args.hidden_size,
        ffn=args.ffn_hidden_size,
        query_heads=args.num_attention_heads,
        key_heads=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        head_dim=args.kv_channels,
        vocab=args.padded_vocab_size,
        gated=args.swiglu,
        tied=not args.untie_embeddings_and_output_weights,
        norm_tensors=1 if args.normalization == "RMSNorm" else 2,
        qk_norm=args.qk_layernorm,
        qkv_bias=args.add_qkv_bias,
        linear_bias=args.add_bias_linear,
        output_gate=getattr(args, "attention_output_gate", False),
        learned_positions=args.max_position_embeddings if args.position_embedding_type == "learned_absolute" else 0,
        experts=_experts(args),
        delta_net=_delta_net(args),
    )


def _network_layers(args: Namespace) -> tuple[Layer, ...]:
    attending = set(megatron_delta_net.attention_layers(args))
    frequency = args.moe_layer_freq
    if args.num_experts is None:
        sparse = [False] * args.num_layers
    elif isinstance(frequency, int):
        sparse = [index % frequency == 0 for index in range(args.num_layers)]
    else:
        sparse = [bool(entry) for entry in frequency]
    layers = []
    for number, has_experts in enumerate(sparse, start=1):
        window = megatron_model.layer_window(args, number) if number in attending else None
        kind = LayerKind.FULL if window is None else LayerKind.WINDOW
        layers.append(Layer(number, kind if number in attending else LayerKind.DELTA_NET, window, has_experts))
    return tuple(layers)


def _experts(args: Namespace) -> Experts | None:
    if args.num_experts is None:
        return None
    return Experts(
        number=args.num_experts,
        chosen=args.moe_router_topk,
        ffn=args.moe_ffn_hidden_size or args.ffn_hidden_size,
        shared_ffn=args.moe_shared_expert_intermediate_size or 0,
        shared_gate=bool(getattr(args, "moe_shared_expert_gate", False)),
    )


def _delta_net(args: Namespace) -> DeltaNetSizes | None:
    if not arguments.has_delta_nets(args):
        return None
    return DeltaNetSizes(
        key_heads=args.linear_num_key_heads,
        value_heads=args.linear_num_value_heads,
        key_dim=args.linear_key_head_dim,
        value_dim=args.linear_value_head_dim,
        look_back=args.linear_conv_kernel_dim - 1,
        row_itemsize=args.params_dtype.itemsize,
    )


def _topology(args: Namespace) -> Topology:
    return Topology(
        gpus=args.world_size,
        tensor=args.tensor_model_parallel_size,
        context=args.context_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        virtual=args.virtual_pipeline_model_parallel_size or 1,
        expert=args.expert_model_parallel_size,
        expert_tensor=args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
        scheme=Scheme(args.diffusion_scheme),
        assignment=BlockAssignment(args.block_assignment),
        sequence_parallel=args.sequence_parallel,
    )


def _stages(args: Namespace, config: object) -> tuple[tuple[tuple[int, ...], ...], ...]:
    chunks = args.virtual_pipeline_model_parallel_size
    return tuple(
        tuple(
            tuple(layer + 1 for layer in megatron_delta_net.layers_of_stage(config, chunk, stage))
            for chunk in (range(chunks) if chunks else (None,))
        )
        for stage in range(args.pipeline_model_parallel_size)
    )


def _recompute(args: Namespace) -> Recompute:
    if args.recompute_granularity == "full":
        uniform = args.recompute_method == "uniform"
        return Recompute(
            whole_layers=None if uniform else args.recompute_num_layers,
            per_checkpoint=args.recompute_num_layers if uniform else 1,
            distributes=args.distribute_saved_activations,
        )
    if args.recompute_granularity == "selective":
        return Recompute(modules=frozenset(args.recompute_modules or ["core_attn"]))
    return Recompute()


def _precision(args: Namespace) -> Precision:
    weights = args.params_dtype.itemsize
    main, first, second = (
        dtype.itemsize if args.use_precision_aware_optimizer else 4
        for dtype in (args.main_params_dtype, args.exp_avg_dtype, args.exp_avg_sq_dtype)
    )
    moments = first + second * (_MOMENTS[args.optimizer] - 1)
    state = moments + (main if weights < 4 else 0)
    offloaded = args.optimizer_offload_fraction if args.optimizer_cpu_offload else 0.0
    key_gradients = args.csbp_grad_reduce_dtype
    return Precision(
        weights=weights,
        gradients=4 if args.accumulate_allreduce_grads_in_fp32 or args.params_dtype == torch.float32 else weights,
        optimizer=round(state * (1 - offloaded)),
        key_gradients=weights if key_gradients is None else GRAD_REDUCE_ITEMSIZES[key_gradients],
    )


def _layers(args: Namespace, changes: Sequence[Change]) -> Layers:
    """Return how the job's own device implements layers: a dry run has turned off what this process lacks."""
    if args.device == "cpu":
        return Layers(fused_norms=False, fused_rope=False)
    before = {change.name: change.before for change in changes if change.reason.startswith("CPU runtime")}
    return Layers(fused_norms=True, fused_rope=bool(before.get("apply_rope_fusion", args.apply_rope_fusion)))
