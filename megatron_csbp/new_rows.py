# SPDX-License-Identifier: Apache-2.0
"""Starts new rows of embedding and output layer as the mean of the trained rows, whoever holds them.

Shapes: V rows of this tensor-parallel rank, H hidden.
"""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_csbp.configuration.new_row_rules import NewRows

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_ROWS_AT_A_TIME = 4096


def start_rows_anew_when_loaded(model: Any, new: NewRows, tensor_group: Any) -> None:
    """Let a stage of a model change the rows as its weights are loaded, before the optimizer copies them.

    Args:
        model: a GPT stage.
        new: which rows, and how.
        tensor_group: process group of the ranks that share the vocabulary.
    """
    streams = {_EMBEDDING: 0, _OUTPUT: 0 if model.share_embeddings_and_output_weights else 1}

    def change(module: Any, state: dict[str, Any], prefix: str, *unused: Any) -> None:
        for name, stream in streams.items():
            weight_VH = state.get(prefix + name)
            if weight_VH is not None:
                fill_new_rows(weight_VH, new, tensor_group, stream)

    model.register_load_state_dict_pre_hook(change)


@torch.no_grad()
def fill_new_rows(weight_VH: Tensor, new: NewRows, tensor_group: Any, stream: int) -> None:
    """Give the new rows their values. All ranks of the group call.

    Sums are in double precision, so that single precision does not depend on how ranks share the rows.

    Args:
        weight_VH: this rank's rows; changed in place.
        new: which rows, and how.
        tensor_group: process group of the ranks that share the rows.
        stream: which noise, 0 for the embedding and whatever is tied to it.
    """
    first = tensor_group.rank() * len(weight_VH)
    rows = torch.arange(first, first + len(weight_VH), device=weight_VH.device)
    is_trained = (rows < new.num_trained) & (rows != new.mask_token_id)
    sum_H = torch.zeros(weight_VH.shape[1], dtype=torch.float64, device=weight_VH.device)
    for start in range(0, len(weight_VH), _ROWS_AT_A_TIME):
        piece = slice(start, start + _ROWS_AT_A_TIME)
        sum_H += weight_VH[piece][is_trained[piece]].double().sum(0)
    dist.all_reduce(sum_H, group=tensor_group)
    mean_H = sum_H / (new.num_trained - (new.mask_token_id < new.num_trained))
    for row in torch.nonzero((rows == new.mask_token_id) | (rows >= new.first_added)).flatten().tolist():
        noise = np.random.default_rng([new.seed, first + row, stream]).standard_normal(len(mean_H))
        noise_H = torch.from_numpy(noise).to(mean_H.device)
        weight_VH[row] = (mean_H + new.noise_std * noise_H).to(weight_VH.dtype)
