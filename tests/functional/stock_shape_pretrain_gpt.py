# SPDX-License-Identifier: Apache-2.0
"""A user's training script: plain autoregressive GPT on Megatron 0.19, and nothing of this package.

It calls Megatron by the names and in the order that the `pretrain_gpt.py` of Megatron-LM core_v0.19 does, which is
what `megatron_csbp.launch` relies on.
"""

import functools
from typing import Any

import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args, get_timers, inprocess_restart, pretrain, set_startup_timestamps
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import is_first_or_last_pipeline_stage


def datasets(num_samples: list[int], vp_stage: int | None = None) -> Any:
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )

    def is_built() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(vp_stage)

    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, is_built, config).build()


def get_batch(data_iterator: Any, vp_stage: int | None) -> Any:
    if not is_first_or_last_pipeline_stage(vp_stage):
        return None, None, None, None, None
    sample = next(data_iterator) if data_iterator is not None else None
    batch = tensor_parallel.broadcast_data(["tokens", "labels", "position_ids"], sample, torch.int64)
    batch |= tensor_parallel.broadcast_data(["loss_mask"], sample, torch.float32)
    batch |= tensor_parallel.broadcast_data(["attention_mask"], sample, torch.bool)
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    return tuple(batch[key] for key in ("tokens", "labels", "loss_mask", "attention_mask", "position_ids"))


def loss(loss_mask: torch.Tensor, output: torch.Tensor) -> Any:
    mask = loss_mask.view(-1).float()
    total = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().clone().detach().to(torch.int)
    get_rerun_state_machine().validate_result(
        result=total, rejection_func=torch.isnan, message="found NaN in local forward loss calculation", fatal=True
    )
    return total, tokens, {"lm loss": torch.cat([total.clone().detach().view(1), tokens.view(1)])}


def forward_step(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    tokens, labels, loss_mask, mask, positions = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(tokens, positions, mask, labels=labels, loss_mask=loss_mask)
    return output, functools.partial(loss, loss_mask)


def embedding_ranks(pp_ranks: list[int]) -> list[int]:
    if len(pp_ranks) == 1 or get_args().untie_embeddings_and_output_weights:
        return pp_ranks[:1]
    return [pp_ranks[0], pp_ranks[-1]]


if __name__ == "__main__":
    set_startup_timestamps(program_start=0.0, main_entry=0.0)
    datasets.is_distributed = True  # type: ignore[attr-defined]
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    args = parse_and_validate_args(extra_args_provider=None, args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(
        config,
        datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        store=store,
        get_embedding_ranks=embedding_ranks,
    )
