# SPDX-License-Identifier: Apache-2.0
"""Lets Megatron's distributed optimizer resume from a checkpoint when it runs on PyTorch's Adam.

Without Transformer Engine and Apex (the CPU runtime hides both) Megatron 0.19 uses PyTorch's Adam, which has no state
before its first step and counts its steps in a tensor of each parameter's state. Loading a checkpoint then fails:

- Megatron asks the optimizer how many steps it has taken before there is any state, and stops at an assertion.
- It copies each parameter's step count from the loaded tensors. Those either have none, and it stops at a missing
  key, or have the count of the new optimizer, and the right one, set just before, is overwritten with 0.
- It copies into fp32 parameters outside ``torch.no_grad()``, and autograd stops it.
- It gives every parameter the same step tensor. Adam counts in place, so after resuming the count would grow by the
  number of parameters in every iteration: a wrong bias correction, without any message.
"""

import functools
import importlib
from typing import Any

import torch


def make_torch_adam_resumable() -> None:
    """Corrects these places in Megatron's ``DistributedOptimizer``; does nothing where it has a fused Adam."""
    module = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
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
    """Gives an Adam that has not stepped yet the state with which its first step would start."""
    optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    for state in optimizer.optimizer.state.values():
        state["step"] = torch.zeros(())
