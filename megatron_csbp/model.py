# SPDX-License-Identifier: Apache-2.0
"""Megatron's GPT model with block-diffusion attention: a config subclass and a builder subclass."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig, default_layer_spec

from megatron_csbp import megatron_compat, megatron_loading, megatron_start
from megatron_csbp.configuration.new_row_rules import NewRows
from megatron_csbp.new_rows import start_rows_anew_when_loaded
from megatron_csbp.parallel_state_ext import (
    block_parallel_is_initialized,
    destroy_block_parallel,
    initialize_block_parallel,
)
from megatron_csbp.transformer.core_attention import BlockDiffusionSettings, CSBPCoreAttention
from megatron_csbp.transformer.corrupted_rows import CorruptedRows
from megatron_csbp.transformer.delta_net.layer_specs import check_mixers, local_hybrid_spec, with_delta_net
from megatron_csbp.transformer.geometry.scheme import Scheme
from megatron_csbp.transformer.last_layer import holds_last_layer, last_layer_spec
from megatron_csbp.transformer.layer_specs import with_core_attention
from megatron_csbp.transformer.norm import with_sequence_parallel_norm
from megatron_csbp.transformer.rotary import RowRotaryEmbedding


@dataclass(kw_only=True)
class BlockDiffusionModelConfig(GPTModelConfig):
    """Megatron's GPT config plus the block-diffusion settings."""

    builder: ClassVar[str] = "megatron_csbp.model.BlockDiffusionModelBuilder"
    block_diffusion: BlockDiffusionSettings | None = None
    check_weights: Callable[[list[GPTModel], Any], None] | None = None
    """Called with the built stages and the pipeline group, before a checkpoint is loaded into them."""
    new_rows: Callable[[], NewRows | None] | None = None
    """Says which rows of the vocabulary the checkpoint does not have trained."""


class BlockDiffusionModelBuilder(GPTModelBuilder):
    """Builds GPT stages whose layers attend under the block-diffusion mask."""

    def __init__(self, model_config: BlockDiffusionModelConfig) -> None:
        """Take a config with `block_diffusion` set; its layer spec is wrapped, not changed."""
        super().__init__(model_config)
        assert model_config.block_diffusion is not None, "block_diffusion settings are missing"
        self._settings = model_config.block_diffusion
        self._stock_spec = model_config.transformer_layer_spec

    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> GPTModel:
        """Build one stage; see `GPTModelBuilder.build_model`."""
        self._model_config.transformer_layer_spec = functools.partial(self._layer_spec, pg_collection=pg_collection)
        model = super().build_model(pg_collection, pre_process, post_process, vp_stage)
        check_mixers(model)
        if hasattr(model, "rotary_pos_emb"):
            rows = self._settings.plans(pg_collection.cp.rank()).rows
            model.rotary_pos_emb = RowRotaryEmbedding(model.rotary_pos_emb, rows)
        return model

    def build_distributed_models(
        self, pg_collection: ProcessGroupCollection, *args: Any, **kwargs: Any
    ) -> list[GPTModel]:
        """Name the block-parallel group, then build and wrap the stages; see `GPTModelBuilder`.

        Weights start the same whatever the size of the context group; not so for tensor, pipeline and expert
        parallelism, whose ranks Megatron seeds apart.
        """
        divides_blocks = self._settings.sharding.scheme in (
            Scheme.BLOCK_PARALLEL,
            Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL,
        )
        if block_parallel_is_initialized():
            destroy_block_parallel()  # of an earlier model in this process
        initialize_block_parallel(pg_collection.cp.size() if divides_blocks else 1)
        megatron_start.restart_default_generator()
        models: list[GPTModel] = super().build_distributed_models(pg_collection, *args, **kwargs)
        if self._model_config.check_weights is not None:
            self._model_config.check_weights(models, pg_collection.pp)
        new = self._model_config.new_rows() if self._model_config.new_rows is not None else None
        if new is not None:
            for model in models:
                start_rows_anew_when_loaded(megatron_loading.unwrapped(model), new, pg_collection.tp)
        return models

    def _layer_spec(
        self, config: GPTModelConfig, vp_stage: int | None = None, *, pg_collection: ProcessGroupCollection
    ) -> Any:
        """Return the stock spec with our mixers and, in the local spec, norms that PyTorch lacks."""
        drops_clean_rows = self._settings.last_layer_drops_clean_rows
        spec = self._stock_spec
        if spec is None:
            spec = self._default_layer_spec(config, vp_stage, pg_collection.pp.rank())
        elif not isinstance(spec, ModuleSpec) and callable(spec):
            takes_stage = "vp_stage" in inspect.signature(spec).parameters
            spec = spec(config, vp_stage=vp_stage) if takes_stage else spec(config)
        needs_own_norm = config.transformer.sequence_parallel or config.transformer.layernorm_zero_centered_gamma
        if needs_own_norm or drops_clean_rows or pg_collection.pp.size() > 1:
            # As a block spec, since only that names the final norm, and has a last layer of its own.
            spec = megatron_compat.block_submodules(config.transformer, spec, vp_stage, pg_collection.pp.rank())
            if not spec.layer_specs:
                return spec  # a pipeline stage without decoder layers
        if needs_own_norm:
            spec = with_sequence_parallel_norm(spec)
        spec = with_delta_net(spec, self._settings)
        core_attention = functools.partial(CSBPCoreAttention, settings=self._settings)
        spec = with_core_attention(spec, core_attention)
        if drops_clean_rows and holds_last_layer(config.transformer, spec, vp_stage, pg_collection.pp.rank()):
            rank_rows = self._settings.plans(pg_collection.cp.rank()).rows
            rows = CorruptedRows(rank_rows, pg_collection.tp, config.transformer.sequence_parallel)
            *others, last = spec.layer_specs
            core_attention = functools.partial(core_attention, drops_clean_rows=True)
            spec.layer_specs = [*others, last_layer_spec(last, core_attention, rows)]
        return spec

    @staticmethod
    def _default_layer_spec(config: GPTModelConfig, vp_stage: int | None, pipeline_rank: int) -> Any:
        """Return Megatron's default spec, and of models with gated delta nets also the local one that it lacks."""
        transformer = config.transformer
        variant = transformer.experimental_attention_variant
        if variant == "gated_delta_net" and transformer.transformer_impl == "local":
            return local_hybrid_spec(transformer, vp_stage, pipeline_rank)
        return default_layer_spec(config, vp_stage)
