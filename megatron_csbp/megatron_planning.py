# SPDX-License-Identifier: Apache-2.0
"""Several command lines, and ranks that do not exist, in one process: a part of `megatron_compat`.

Its symbols are in `required_symbols.REQUIRED_SYMBOLS`. Nothing here imports Megatron until it is called.
"""

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch


def forget_arguments() -> None:
    """Let the next command line be parsed: Megatron keeps one for the life of a process."""
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.training.global_vars import destroy_global_vars

    destroy_global_vars()
    destroy_num_microbatches_calculator()


@contextlib.contextmanager
def parallel_state(args: Namespace) -> Iterator[Any]:
    """Give Megatron the process groups of this rank while open, and yield their collection.

    Args:
        args: validated arguments; the default process group must be initialised with all ranks.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import random

    mpu.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    try:
        random.model_parallel_cuda_manual_seed(1)
        yield ProcessGroupCollection.use_mpu_process_groups()
    finally:
        mpu.destroy_model_parallel()


def build_without_values(config: Any, groups: Any, stage: int, chunk: int | None) -> Any:
    """Build one model chunk of a pipeline rank on meta tensors, which have shapes but no memory.

    Args:
        config: Megatron's config of the whole model; its transformer config is changed in place.
        groups: of this rank.
        stage: pipeline rank.
        chunk: number of the chunk on that rank; None if it has but one.
    """
    transformer = config.transformer
    transformer.perform_initialization = False
    transformer.init_model_with_meta_device = True
    last = transformer.pipeline_model_parallel_size - 1
    chunks = transformer.virtual_pipeline_model_parallel_size or 1
    with torch.device("meta"):
        return config.get_builder_cls()(config).build_model(
            groups,
            pre_process=stage == 0 and not chunk,
            post_process=stage == last and chunk in (None, chunks - 1),
            vp_stage=chunk,
        )
