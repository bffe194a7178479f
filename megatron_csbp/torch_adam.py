# SPDX-License-Identifier: Apache-2.0
"""Lets Megatron's distributed optimizer resume from a checkpoint when it runs on PyTorch's Adam.

Without Transformer Engine and Apex (the CPU runtime hides both) Megatron 0.19 uses PyTorch's Adam, which has no state
before its first step and counts its steps in a tensor of each parameter's state. Loading a checkpoint then fails, on
CUDA too, so block-diffusion runs get the correction on any device; on CUDA, plain Megatron runs are left alone:

- Megatron asks the optimizer how many steps it has taken before there is any state, and stops at an assertion.
- It copies each parameter's step count from the loaded tensors. Those either have none, and it stops at a missing
  key, or have the count of the new optimizer, and the right one, set just before, is overwritten with 0.
- It copies into fp32 parameters outside `torch.no_grad()`, and autograd stops it.
- It gives every parameter the same step tensor. Adam counts in place, so after resuming the count would grow by the
  number of parameters in every iteration: a wrong bias correction, without any message.
"""

import functools
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

_MODULE = "megatron.core.optimizer.distrib_optimizer"


def correct_distributed_optimizer_when_imported() -> None:
    """Arrange that Megatron's distributed optimizer is corrected as soon as it is imported."""
    sys.meta_path.insert(0, _Importer())


class _Importer(MetaPathFinder):
    """Finds one module as usual and corrects it after it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == _MODULE else None
        if spec is not None and spec.loader is not None:
            run_module = spec.loader.exec_module

            def run_and_correct(module: ModuleType) -> None:
                run_module(module)
                correct_distributed_optimizer(module)

            spec.loader.exec_module = run_and_correct  # type: ignore[method-assign]
        return spec


def correct_distributed_optimizer_now() -> None:
    """Correct Megatron's distributed optimizer, unless that has been done."""
    correct_distributed_optimizer(importlib.import_module(_MODULE))


def correct_distributed_optimizer(module: Any) -> None:
    """Correct the places above in `DistributedOptimizer`; do nothing where Megatron has a fused Adam."""
    cls = module.DistributedOptimizer
    if module.HAVE_APEX_OR_TE or hasattr(cls.load_state_dict, "__wrapped__"):
        return
    state_dict, load_state_dict = cls.state_dict, cls.load_state_dict
    set_states = cls._set_main_param_and_optimizer_states

    @functools.wraps(state_dict)
    def state_dict_with_state(self: Any) -> Any:
        if _is_torch_adam(self) and not self.optimizer.state:
            _create_state(self)
        return state_dict(self)

    @functools.wraps(set_states)
    @torch.no_grad()
    def set_states_but_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        set_states(self, model_param, {**tensors, "step": None})

    @functools.wraps(load_state_dict)
    def load_state_dict_with_own_steps(self: Any, *args: Any, **kwargs: Any) -> None:
        load_state_dict(self, *args, **kwargs)
        if _is_torch_adam(self):
            for state in self.optimizer.state.values():
                state["step"] = state["step"].clone()

    cls.state_dict, cls.load_state_dict = state_dict_with_state, load_state_dict_with_own_steps
    cls._set_main_param_and_optimizer_states = set_states_but_step


def _is_torch_adam(optimizer: Any) -> bool:
    return isinstance(optimizer.optimizer, torch.optim.Adam | torch.optim.AdamW)


def _create_state(optimizer: Any) -> None:
    """Give an Adam that has not stepped yet the state with which its first step would start."""
    optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    for state in optimizer.optimizer.state.values():
        state["step"] = torch.zeros(())
