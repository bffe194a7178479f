# SPDX-License-Identifier: Apache-2.0
"""What this package needs of Megatron-Core: its version, and every symbol that is not public API.

A contract test checks the symbols one by one, so that a Megatron which moved one is told by its name. Nothing here
imports Megatron until it is called: `megatron_csbp.cpu_runtime.install` has to run first.
"""

import dataclasses
import importlib
import inspect

MIN_VERSION = (0, 19)
BELOW_VERSION = (0, 20)


@dataclasses.dataclass(frozen=True)
class RequiredSymbol:
    """A Megatron symbol that this package relies on.

    Attributes:
        name: dotted name: module, then attributes (`megatron.core.utils.get_pg_size`).
        parameters: names of parameters that we pass by keyword or replace; the callable must accept each of them.
        used_for: what breaks without it.
    """

    name: str
    used_for: str
    parameters: tuple[str, ...] = ()

    def resolve(self) -> object:
        """Import the module and return the symbol.

        Raises:
            ImportError: If the module or the attribute does not exist; the message names it.
        """
        parts = self.name.split(".")
        for length in range(len(parts), 0, -1):
            module_name = ".".join(parts[:length])
            try:
                value: object = importlib.import_module(module_name)
            except ModuleNotFoundError as error:
                # Only "this is not a module" may fall through to its parent, not a missing dependency of it.
                if error.name is None or not module_name.startswith(error.name):
                    raise
                continue
            for attribute in parts[length:]:
                if not hasattr(value, attribute):
                    raise ImportError(f"{self.name} ({self.used_for}): {attribute!r} is not in this Megatron")
                value = getattr(value, attribute)
            return value
        raise ImportError(f"{self.name} ({self.used_for}): {parts[0]!r} cannot be imported")

    def check(self) -> None:
        """Check that the symbol exists and accepts its parameters.

        Raises:
            ImportError: If it does not; the message names the symbol and the parameter.
        """
        value = self.resolve()
        if not self.parameters:
            return
        accepted = inspect.signature(value).parameters  # type: ignore[arg-type]
        missing = [name for name in self.parameters if name not in accepted]
        if missing:
            raise ImportError(f"{self.name} ({self.used_for}): no parameter {', '.join(missing)} in this Megatron")


# Symbol, parameters that the callable must accept, what needs it.
_TABLE: tuple[tuple[str, str, str], ...] = (
    ("megatron.core.__version__", "", "the version check"),
    ("megatron.core.datasets.utils.compile_helpers", "", "the dataset index builder of a wheel"),
    ("megatron.core.datasets.helpers", "", "the dataset index builder of a wheel"),
    (
        "megatron.core.datasets.gpt_dataset.GPTDataset._query_document_sample_shuffle_indices",
        "",
        "the dual-end sampler",
    ),
    ("megatron.training.datasets.data_samplers.RandomSeedDataset.set_epoch", "epoch", "noise of each epoch"),
    (
        "megatron.training.datasets.data_samplers.MegatronFullValidationSampler",
        "total_samples data_parallel_rank data_parallel_size",
        "--full-validation",
    ),
    ("megatron.core.transformer.torch_norm.WrappedTorchNorm", "", "sequence parallelism with the local spec"),
    (
        "megatron.core.transformer.transformer_block._get_block_submodules",
        "config spec vp_stage pp_rank",
        "sequence parallelism with the local spec",
    ),
    (
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states",
        "model_param tensors",
        "resuming with PyTorch's Adam",
    ),
    ("megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.state_dict", "", "resuming with PyTorch's Adam"),
    (
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.load_state_dict",
        "state_dict",
        "resuming with PyTorch's Adam",
    ),
    ("megatron.core.optimizer.distrib_optimizer.HAVE_APEX_OR_TE", "", "resuming with PyTorch's Adam"),
    ("megatron.training.arguments.add_megatron_arguments", "parser", "the flags that a job may have"),
    ("megatron.training.arguments.parse_args", "extra_args_provider", "the command line"),
    ("megatron.training.arguments.validate_args", "args defaults", "the command line"),
    ("megatron.training.global_vars.set_global_variables", "args", "the command line"),
    ("megatron.training.global_vars.get_args", "", "the command line"),
    ("megatron.training.global_vars.get_tokenizer", "", "the mask token"),
    ("megatron.core.parallel_state.get_pipeline_model_parallel_rank", "", "weights at the start"),
    ("megatron.core.parallel_state.get_data_parallel_rank", "", "weights at the start"),
    ("megatron.training.checkpointing.generate_state_dict", "args", "the sequence length in a checkpoint"),
    ("megatron.training.checkpointing.load_args_from_checkpoint", "args load_arg", "--use-checkpoint-args"),
    ("megatron.core.dist_checkpointing.check_is_distributed_checkpoint", "checkpoint_dir", "the check on resuming"),
    ("megatron.core.dist_checkpointing.load_common_state_dict", "checkpoint_dir", "the check on resuming"),
    ("megatron.core.dist_checkpointing.load_content_metadata", "preloaded_state_dict", "the check on resuming"),
    ("megatron.core.dist_checkpointing.mapping.ShardedTensor", "key global_shape allow_shape_mismatch", "the weights"),
    ("megatron.core.utils.unwrap_model", "model", "the weights in a checkpoint"),
    ("megatron.core.dist_checkpointing.mapping.apply_factories", "", "the weights in a checkpoint"),
    ("megatron.core.dist_checkpointing.dict_utils.nested_values", "", "the weights in a checkpoint"),
    ("megatron.core.parallel_state.get_data_parallel_group", "with_context_parallel", "the weights in a checkpoint"),
    ("megatron.core.optimizer.distrib_optimizer.DistributedOptimizer", "", "optimizer state in another division"),
    (
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.checkpoint_fully_reshardable_formats",
        "",
        "optimizer state in another division",
    ),
    (
        "megatron.training.argument_utils.core_transformer_config_from_args",
        "args config_class",
        "comparing networks",
    ),
    (
        "megatron.training.argument_utils.gpt_config_from_args",
        "args config model_config_cls",
        "comparing networks",
    ),
    ("megatron.core.transformer.transformer_config.TransformerConfig", "", "comparing networks"),
    ("megatron.core.transformer.transformer_config.MLATransformerConfig", "", "comparing networks"),
    ("megatron.core.model_parallel_config.ModelParallelConfig", "", "comparing networks"),
    ("megatron.training.models.gpt.GPTModelConfig", "", "comparing networks"),
    ("megatron.training.global_vars.destroy_global_vars", "", "planning several jobs"),
    (
        "megatron.core.num_microbatches_calculator.destroy_num_microbatches_calculator",
        "",
        "planning several jobs",
    ),
    (
        "megatron.core.parallel_state.initialize_model_parallel",
        "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
        "context_parallel_size expert_model_parallel_size expert_tensor_parallel_size create_gloo_process_groups",
        "planning",
    ),
    ("megatron.core.parallel_state.destroy_model_parallel", "", "planning"),
    ("megatron.core.tensor_parallel.random.model_parallel_cuda_manual_seed", "seed", "planning"),
    ("megatron.core.process_groups_config.ProcessGroupCollection", "", "planning"),
    ("megatron.training.initialize.initialize_megatron", "", "generating text"),
    (
        "megatron.training.checkpointing.load_checkpoint",
        "ddp_model optimizer opt_param_scheduler",
        "generating text",
    ),
    ("megatron.training.training.evaluate", "eval_iters", "megatron_csbp.evaluate"),
    ("megatron.core.parallel_state.get_context_parallel_rank", "", "rows of this rank"),
    ("megatron.core.parallel_state.get_context_parallel_group", "", "rows of this rank"),
    ("megatron.core.parallel_state.get_tensor_model_parallel_rank", "", "loading on one tensor-parallel rank"),
    ("megatron.core.parallel_state.get_tensor_model_parallel_src_rank", "", "loading on one tensor-parallel rank"),
    ("megatron.core.parallel_state.get_tensor_model_parallel_group", "", "loading on one tensor-parallel rank"),
    ("megatron.core.parallel_state.is_pipeline_first_stage", "", "loading on the first and last stage"),
    ("megatron.core.parallel_state.is_pipeline_last_stage", "ignore_virtual", "loading on the first and last stage"),
    ("megatron.training.utils.is_first_or_last_pipeline_stage", "vp_stage", "loading on the first and last stage"),
    (
        "megatron.core.transformer.utils.is_layer_window_attention",
        "window_size window_attn_skip_freq layer_number",
        "layers with a window",
    ),
    (
        "megatron.core.tensor_parallel.gather_from_sequence_parallel_region",
        "input_ tensor_parallel_output_grad",
        "logits of single rows under sequence parallelism",
    ),
    ("megatron.core.utils.get_attr_wrapped_model", "model attr", "the forward step"),
    (
        "megatron.core.utils.get_batch_on_this_tp_rank",
        "batch broadcast_src_rank broadcast_group create_attention_mask_in_dataloader has_cu_seqlens is_hybrid_cp "
        "cp_size tp_rank micro_batch_size seq_length mtp_on_this_rank pipeline_model_parallel_size "
        "is_pipeline_first_stage is_pipeline_last_stage",
        "autoregressive batches",
    ),
    (
        "megatron.core.utils.get_batch_on_this_cp_rank",
        "batch is_hybrid_cp cp_group hybrid_cp_group_func use_per_sequence_balancing",
        "autoregressive batches",
    ),
    ("megatron.training.global_vars.get_timers", "", "timers that pretrain requires"),
    ("megatron.core.rerun_state_machine.get_rerun_state_machine", "", "the check of the loss"),
    (
        "megatron.core.rerun_state_machine.RerunStateMachine.validate_result",
        "result rejection_func message tolerance fatal",
        "the check of the loss",
    ),
    (
        "megatron.core.rerun_state_machine.RerunStateMachine.is_unexpectedly_large",
        "threshold context",
        "--check-for-spiky-loss",
    ),
    ("megatron.core.ssm.gated_delta_net.GatedDeltaNet._setup_variant_attrs", "", "gated delta nets"),
    ("megatron.core.ssm.gated_delta_net.common.HAVE_FLA", "", "gated delta nets without fla"),
    (
        "megatron.core.models.gpt.experimental_attention_variant_module_specs.get_linear_attention_pattern",
        "config",
        "gated delta nets with the local spec",
    ),
    (
        "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_layer_specs",
        "config use_transformer_engine normalization qk_l2_norm",
        "gated delta nets with the local spec",
    ),
    ("megatron.core.transformer.transformer_block.TransformerBlockSubmodules", "", "gated delta nets, local spec"),
    ("megatron.core.transformer.enums.LayerType", "", "gated delta nets, local spec"),
    (
        "megatron.core.transformer.transformer_layer.get_transformer_layer_offset",
        "config vp_stage pp_rank",
        "gated delta nets with the local spec",
    ),
    (
        "megatron.core.transformer.transformer_block.get_num_layers_to_build",
        "config vp_stage pp_rank",
        "gated delta nets with the local spec",
    ),
    (
        "megatron.core.ssm.gated_delta_net.common._build_head_perm_for_split_sections",
        "split_sections cp_size device",
        "gated delta nets of the CP baseline",
    ),
    (
        "megatron.core.ssm.gated_delta_net.common.tensor_a2a_cp2hp",
        "seq_dim head_dim cp_group undo_attention_load_balancing",
        "gated delta nets of the CP baseline",
    ),
    (
        "megatron.core.ssm.gated_delta_net.common.tensor_a2a_hp2cp",
        "seq_dim head_dim cp_group redo_attention_load_balancing",
        "gated delta nets of the CP baseline",
    ),
    (
        "megatron.core.ssm.gated_delta_net.common.get_parameter_local_cp",
        "dim cp_group split_sections",
        "gated delta nets of the CP baseline",
    ),
    ("megatron.core.utils.get_model_config", "model", "the end of an iteration"),
    (
        "megatron.core.model_parallel_config.ModelParallelConfig.finalize_model_grads_func",
        "",
        "the end of an iteration",
    ),
    ("megatron.training.training.update_seqlen_stats_from_cu_seqlens", "cu_seqlens", "the FLOPs report"),
    (
        "megatron.training.training.num_floating_point_operations",
        "args batch_size seqlen_squared_sum_in_batch total_real_tokens_in_batch",
        "the FLOPs report",
    ),
    ("megatron.core.num_microbatches_calculator.get_current_running_global_batch_size", "", "the FLOPs report"),
    ("megatron.training.utils.print_rank_last", "message", "reports"),
    ("megatron.training.global_vars.get_tensorboard_writer", "", "reports"),
    ("megatron.training.global_vars.get_wandb_writer", "", "reports"),
    ("megatron.core.timers.Timer.set_elapsed", "value", "--csbp-timing"),
    ("megatron.core.timers.Timer.active_time", "", "the line of progress"),
)

REQUIRED_SYMBOLS: list[RequiredSymbol] = [
    RequiredSymbol(name, used_for, tuple(parameters.split())) for name, parameters, used_for in _TABLE
]


def megatron_version() -> str:
    """Return the version of the Megatron-Core that is imported, which need not be the one that pip knows."""
    version: str = importlib.import_module("megatron.core").__version__
    return version.split("+")[0]  # Megatron adds the git revision of whatever repository the job was started in


def check_megatron_version(version: str | None = None) -> None:
    """Check that Megatron-Core is one of the supported versions.

    Args:
        version: Version to check; the imported one by default.

    Raises:
        ImportError: If it is not; the message names the version, the supported range and what to install.
    """
    version = megatron_version() if version is None else version
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not MIN_VERSION <= numbers < BELOW_VERSION:
        lower, upper = (".".join(map(str, bound)) for bound in (MIN_VERSION, BELOW_VERSION))
        raise ImportError(
            f"megatron-core {version} is not supported: megatron_csbp needs >={lower},<{upper}; "
            f"pip install 'megatron-core>={lower},<{upper}' works"
        )
