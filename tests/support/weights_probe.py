# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of imported weights: run the command, or load a checkpoint and compute logits.

Shapes: B sequences, S tokens, H hidden, V vocabulary.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def command(arguments: list[str]) -> None:
    """Run `python -m megatron_csbp.weights` with these arguments."""
    from megatron_csbp.weights.__main__ import main

    sys.exit(main(arguments))


def logits(request: dict[str, Any]) -> None:
    """Load what `--load` names, as a training run does, and write the logits of some tokens.

    Args:
        request: `arguments`: command line of an autoregressive run; `folder`: with `tokens.pt`, [B, S]; gets
            `logits.pt`, [B, S, V].
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
    from megatron.training.argument_utils import gpt_config_from_args

    from megatron_csbp import cpu_runtime, megatron_compat, megatron_loading, training_setup

    sys.argv = ["probe", *request["arguments"]]
    args = training_setup.parse_and_validate_args(cpu_runtime.install("cpu"))
    megatron_compat.ensure_dataset_helpers()
    megatron_loading.initialize_megatron()
    config = gpt_config_from_args(args)
    model = config.get_builder_cls()(config).build_model(ProcessGroupCollection.use_mpu_process_groups()).eval()
    megatron_loading.load_weights(model)
    tokens_BS = torch.load(Path(request["folder"]) / "tokens.pt")
    positions_BS = torch.arange(tokens_BS.shape[1]).expand(tokens_BS.shape)
    mask = torch.ones(1, 1, tokens_BS.shape[1], tokens_BS.shape[1]).tril() < 0.5
    with torch.no_grad():
        if not parallel_state.is_pipeline_first_stage():
            hidden_SBH = torch.empty(tokens_BS.shape[1], tokens_BS.shape[0], args.hidden_size)
            torch.distributed.recv(hidden_SBH, parallel_state.get_pipeline_model_parallel_prev_rank())
            model.set_input_tensor(hidden_SBH)
        output: Tensor = model(tokens_BS, positions_BS, mask)
        if not parallel_state.is_pipeline_last_stage():
            torch.distributed.send(output.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
            return
        logits_BSV = gather_from_tensor_model_parallel_region(output)
    if parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_data_parallel_rank() == 0:
        torch.save(logits_BSV, Path(request["folder"]) / "logits.pt")
