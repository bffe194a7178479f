# SPDX-License-Identifier: Apache-2.0
"""When Megatron's distributed optimizer is corrected; tests/functional/test_checkpoints.py shows that it resumes."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_csbp.torch_adam import correct_distributed_optimizer


def module_with(has_fused_adam: bool) -> Any:
    """Return what Megatron's module looks like to the correction."""

    class DistributedOptimizer:
        def state_dict(self) -> None: ...
        def load_state_dict(self) -> None: ...
        def _set_main_param_and_optimizer_states(self) -> None: ...

    return SimpleNamespace(HAVE_APEX_OR_TE=has_fused_adam, DistributedOptimizer=DistributedOptimizer)


def methods(module: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(module.DistributedOptimizer).items() if callable(value)}


def test_nothing_changes_where_megatron_has_a_fused_adam() -> None:
    module = module_with(has_fused_adam=True)
    before = methods(module)
    correct_distributed_optimizer(module)
    assert methods(module) == before


def test_it_is_corrected_once_however_often_that_is_asked_for() -> None:
    module = module_with(has_fused_adam=False)
    before = methods(module)
    correct_distributed_optimizer(module)
    once = methods(module)
    assert [name for name in before if once[name] is before[name]] == []
    correct_distributed_optimizer(module)
    assert methods(module) == once


@pytest.mark.parametrize("name", ["state_dict", "load_state_dict", "_set_main_param_and_optimizer_states"])
def test_a_corrected_method_still_has_its_name_and_the_original(name: str) -> None:
    module = module_with(has_fused_adam=False)
    original = methods(module)[name]
    correct_distributed_optimizer(module)
    corrected = methods(module)[name]
    assert (corrected.__name__, corrected.__wrapped__) == (name, original)
