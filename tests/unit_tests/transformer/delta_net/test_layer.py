# SPDX-License-Identifier: Apache-2.0
"""Megatron's layer as the builder makes it: numbers, parameters, and what can stand in a model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.functional.model_flags import BLOCK_DIFFUSION, CSBP2, HYBRID, words
from tests.support.megatron_run import Ranks

SCHEMES = {
    "one rank": ([], 1),
    "csbp2": (CSBP2, 2),
    "pure bp2": (["--bp-size", "2"], 2),
    "cp2": (["--context-parallel-size", "2", "--context-scheme", "cp"], 2),
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_output_and_every_gradient_equal_the_formulas(scheme: str, ranks: Ranks, tmp_path: Path) -> None:
    """Of the input and of all parameters: projections, convolution, decay, step bias, norm."""
    flags, world_size = SCHEMES[scheme]
    request = {
        "arguments": [*HYBRID, *BLOCK_DIFFUSION, *words("--train-iters 1"), *flags],
        "folder": str(tmp_path),
        "transformers": scheme == "one rank",
    }
    ranks.call("tests.support.delta_layer_probe:run", request, world_size).check()
    facts: dict[str, Any] = torch.load(tmp_path / "facts.pt")
    assert set(facts["errors"]) == {
        "out",
        "hidden",
        "in_proj.weight",
        "conv1d.weight",
        "A_log",
        "dt_bias",
        "out_norm.weight",
        "out_proj.weight",
    }
    assert {name: error for name, error in facts["errors"].items() if not error <= 1e-11} == {}
    if scheme == "one rank":
        assert facts["transformers"] < 1e-5  # which computes in fp32


def test_every_stage_builds_and_megatrons_own_layer_is_out_of_reach(ranks: Ranks) -> None:
    """A stage of gated delta nets alone, keys of the checkpoint, and specs that would bring in the stock layer."""
    ranks.call("tests.unit_tests.transformer.delta_net.test_layer:build_stages", None, 2).check()


def build_stages(_: None) -> None:
    """Be one of two pipeline stages."""
    import sys

    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet
    from megatron.training.initialize import initialize_megatron

    from megatron_csbp import cpu_runtime, megatron_compat, training_setup
    from megatron_csbp.transformer.delta_net.layer import BlockDiffusionGatedDeltaNet
    from megatron_csbp.transformer.delta_net.layer_specs import check_mixers

    sys.argv = ["stages", *HYBRID, *BLOCK_DIFFUSION, *words("--train-iters 1 --pipeline-model-parallel-size 2")]
    args = training_setup.parse_and_validate_args(cpu_runtime.install("cpu"))
    megatron_compat.ensure_dataset_helpers()
    initialize_megatron()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = training_setup.model_config_from_args(args)

    model = config.get_builder_cls()(config).build_model(groups)
    kinds = [type(layer.self_attention).__name__ for layer in model.decoder.layers]
    own = BlockDiffusionGatedDeltaNet.__name__
    assert kinds == ([own, own], [own, "SelfAttention"])[groups.pp.rank()], kinds

    keys = {key for key in model.sharded_state_dict() if ".layers.0." in key}
    assert any(key.endswith("self_attention.in_proj.weight") for key in keys), sorted(keys)

    # A user's spec with Megatron's layer gets ours; one that smuggles it past the specs is refused.
    spec = config.get_builder_cls()(config)._default_layer_spec(config, None, groups.pp.rank())
    assert spec.layer_specs[0].submodules.self_attention.module is GatedDeltaNet
    theirs = type("TheirDeltaNet", (GatedDeltaNet,), {})
    spec.layer_specs[0].submodules.self_attention.module = theirs
    config.transformer_layer_spec = lambda config: spec
    with pytest.raises(ValueError, match="--spec has layers TheirDeltaNet, which do not know the copies"):
        config.get_builder_cls()(config).build_model(groups)
    spec.layer_specs[0].submodules.self_attention.module = GatedDeltaNet
    again = config.get_builder_cls()(config).build_model(groups)
    assert [type(layer.self_attention).__name__ for layer in again.decoder.layers] == kinds
    delta_net = again.decoder.layers[0].self_attention
    delta_net.__class__ = GatedDeltaNet
    for broken, name in ((delta_net, "GatedDeltaNet"), (torch.nn.Linear(2, 2), "Linear")):
        again.decoder.layers[0].self_attention = broken
        with pytest.raises(ValueError, match=f"--spec puts {name} into layer .*does not know"):
            check_mixers(again)
