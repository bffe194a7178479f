# SPDX-License-Identifier: Apache-2.0
import pytest

from megatron_csbp.configuration import checkpoint_defaults
from tests.support.megatron_arguments import parser


@pytest.mark.parametrize("names", ["_MODEL", "_VOCABULARY", "_OBJECTIVE"])
def test_what_is_taken_from_a_checkpoint_are_arguments_that_exist(names: str) -> None:
    known = {action.dest for action in parser()._actions}
    assert [name for name in getattr(checkpoint_defaults, names).split() if name not in known] == []
