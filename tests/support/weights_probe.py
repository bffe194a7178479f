# SPDX-License-Identifier: Apache-2.0
"""What ranks do in the tests of imported weights: run the command, or load a checkpoint and compute logits.

Shapes: B sequences, S tokens, R rows, H hidden, V vocabulary.
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
        request: `arguments`: command line of an autoregressive run, or of one with blocks of one token, whose clean
            rows are the same model; `folder`: with `tokens.pt`, [B, S]; gets `logits.pt`, [B, S, V].
    """
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
    from megatron.training.argument_utils import gpt_config_from_args

    from megatron_csbp import arguments, cpu_runtime, megatron_compat, megatron_loading, training_setup

    sys.argv = ["probe", *request["arguments"]]
    args = training_setup.parse_and_validate_args(cpu_runtime.install("cpu"))
    megatron_compat.ensure_dataset_helpers()
    megatron_loading.initialize_megatron()
    tokens_BS = torch.load(Path(request["folder"]) / "tokens.pt")
    length, mask = tokens_BS.shape[1], None
    if arguments.is_block_diffusion(args):
        config = training_setup.model_config_from_args(args)
        rows = arguments.static_plans(args, rank=0).rows
        positions_R, clean_R = torch.from_numpy(rows.positions), torch.from_numpy(~rows.is_corrupted)
    else:
        config = gpt_config_from_args(args)
        positions_R, clean_R = torch.arange(length), torch.ones(length, dtype=torch.bool)
        mask = torch.ones(1, 1, length, length).tril() < 0.5
    tokens_BR, positions_BR = tokens_BS[:, positions_R], positions_R.expand(len(tokens_BS), -1)
    model = config.get_builder_cls()(config).build_model(ProcessGroupCollection.use_mpu_process_groups()).eval()
    megatron_loading.load_weights(model)
    with torch.no_grad():
        if not parallel_state.is_pipeline_first_stage():
            hidden_RBH = torch.empty(*reversed(tokens_BR.shape), args.hidden_size)
            torch.distributed.recv(hidden_RBH, parallel_state.get_pipeline_model_parallel_prev_rank())
            model.set_input_tensor(hidden_RBH)
        output: Tensor = model(tokens_BR, positions_BR, mask)
        if not parallel_state.is_pipeline_last_stage():
            torch.distributed.send(output.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
            return
        logits_BSV = gather_from_tensor_model_parallel_region(output)[:, clean_R]
    if parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_data_parallel_rank() == 0:
        torch.save(logits_BSV, Path(request["folder"]) / "logits.pt")
