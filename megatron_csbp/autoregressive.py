# SPDX-License-Identifier: Apache-2.0
"""The plain autoregressive run of `megatron_csbp.pretrain_gpt` without block-diffusion flags.

The wheel of megatron-core has no `pretrain_gpt.py`. This does what that script does on its main path, with Megatron's
own batch, dataset and loss arithmetic; what only the script has (packed SFT, fill-in-the-middle, distillation, hybrid
CP) is refused by name, and `megatron_csbp.launch` runs the script itself.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset
from megatron.training import get_args
from torch import Tensor

from megatron_csbp import megatron_compat
from megatron_csbp.data.datasets import dataset_config

_ONLY_IN_STOCK_SCRIPT = (
    "sft",
    "fim_data",
    "hybrid_context_parallel",
    "dataloader_inter_document_masking",
    "mtp_num_layers",
    "logits_load_dir",
    "perform_rl_step",
    "overlap_moe_expert_parallel_comm",
)


def check_supported(args: Namespace) -> None:
    """Refuse what only Megatron-LM's own script does.

    Raises:
        ValueError: such a flag is given.
    """
    for name in _ONLY_IN_STOCK_SCRIPT:
        if getattr(args, name, None):
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(args, name)} is handled by Megatron-LM's pretrain_gpt.py only; "
                "run it with python -m megatron_csbp.launch path/to/Megatron-LM/pretrain_gpt.py and the same flags."
            )


def datasets_provider(num_samples: Sequence[int], vp_stage: int | None = None) -> Any:
    """Build Megatron's GPT datasets for training, validation and test."""
    args = get_args()
    dataset_type = MockGPTDataset if args.mock_data else GPTDataset
    config = dataset_config(Namespace(**vars(args), clean_seq_length=args.seq_length))
    config.reset_position_ids, config.reset_attention_mask = args.reset_position_ids, args.reset_attention_mask
    config.create_attention_mask = args.create_attention_mask_in_dataloader
    is_built = partial(megatron_compat.rank_loads_data, vp_stage)
    return BlendedMegatronDatasetBuilder(dataset_type, num_samples, is_built, config).build()


datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # Megatron then calls it on every rank


def forward_step(
    data_iterator: Iterator[dict[str, Tensor]] | None, model: Any, return_schedule_plan: bool = False
) -> tuple[Tensor, Any]:
    """Run one micro-batch; see Megatron's `forward_step_func`."""
    assert not return_schedule_plan, "--overlap-moe-expert-parallel-comm is refused at start"
    args = get_args()
    with megatron_compat.batch_timer():
        batch = megatron_compat.next_autoregressive_batch(data_iterator, model, args)
    if batch is None:
        return model(None, None, None), None
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss, batch["loss_mask"])


def loss(loss_mask: Tensor | None, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum of the masked token losses, the number of tokens, and the report.

    Args:
        loss_mask: 1 where a token counts, [B, S].
        losses: cross-entropy of each token, [B, S].
    """
    assert loss_mask is not None, "the last pipeline stage has a loss mask"
    mask = loss_mask.view(-1).float()
    total = torch.sum(losses.view(-1).float() * mask)
    num_tokens = mask.sum().clone().detach().to(torch.int)
    megatron_compat.check_loss(total, get_args())
    return total, num_tokens, {"lm loss": torch.cat([total.clone().detach().view(1), num_tokens.view(1)])}
