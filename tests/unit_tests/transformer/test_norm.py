# SPDX-License-Identifier: Apache-2.0
"""Norms of the local layer spec that allow sequence parallelism."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_csbp.transformer.norm import SequenceParallelNorm, with_sequence_parallel_norm


def config(**changes: Any) -> Any:
    values = {
        "normalization": "RMSNorm",
        "sequence_parallel": False,
        "layernorm_zero_centered_gamma": False,
        "persist_layer_norm": False,
        "memory_efficient_layer_norm": False,
    }
    return SimpleNamespace(**values | changes)


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_is_the_norm_that_megatron_builds(normalization: str) -> None:
    """Module, state-dict keys and numbers, so that checkpoints pass from one to the other."""
    arguments = {"config": config(normalization=normalization), "hidden_size": 8, "eps": 1e-3}
    ours, theirs = SequenceParallelNorm(**arguments), WrappedTorchNorm(**arguments)
    assert type(ours) is type(theirs)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    x = torch.randn(3, 8)
    assert ours(x).equal(theirs(x))


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_a_zero_centred_weight_is_the_plain_weight_less_one(normalization: str) -> None:
    plain = SequenceParallelNorm(config(normalization=normalization), 8)
    centred = SequenceParallelNorm(config(normalization=normalization, layernorm_zero_centered_gamma=True), 8)
    assert centred.weight.equal(torch.zeros(8))
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.add_(torch.randn(8))
            centred.get_parameter(name).copy_(parameter - float(name == "weight"))
    x = torch.randn(3, 8)
    torch.testing.assert_close(centred(x), plain(x))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_parameters_are_marked_for_the_sum_over_ranks(normalization: str, sequence_parallel: bool) -> None:
    norm = SequenceParallelNorm(config(normalization=normalization, sequence_parallel=sequence_parallel), 8)
    marks = [parameter.sequence_parallel for parameter in norm.parameters()]
    assert marks == [sequence_parallel] * (2 if normalization == "LayerNorm" else 1)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"normalization": "L2Norm"}, r"--normalization L2Norm: .*--normalization RMSNorm works"),
        ({"persist_layer_norm": True}, r"--no-persist-layer-norm works"),
        ({"memory_efficient_layer_norm": True}, r"memory_efficient_layer_norm .*leave it off"),
    ],
)
def test_what_torch_does_not_have_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceParallelNorm(config(**changes), 8)


def norms(layer: Any) -> list[Any]:
    attention = layer.submodules.self_attention.submodules
    return [
        layer.submodules.input_layernorm,
        layer.submodules.pre_mlp_layernorm,
        attention.q_layernorm,
        attention.k_layernorm,
    ]


def local_layer() -> Any:
    return get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")


def test_every_norm_of_a_layer_spec_is_replaced() -> None:
    assert norms(local_layer()) == [WrappedTorchNorm] * 4
    assert norms(with_sequence_parallel_norm(local_layer())) == [SequenceParallelNorm] * 4


def test_the_final_norm_of_a_block_spec_is_replaced_too() -> None:
    layer = local_layer()
    block = with_sequence_parallel_norm(
        TransformerBlockSubmodules(layer_specs=[layer, layer], layer_norm=WrappedTorchNorm)
    )
    assert block.layer_norm is SequenceParallelNorm
    assert [norms(spec) for spec in block.layer_specs] == [[SequenceParallelNorm] * 4] * 2


def test_the_given_spec_is_not_changed() -> None:
    layer = local_layer()
    before = repr(layer)
    with_sequence_parallel_norm(layer)
    assert repr(layer) == before


def test_other_norms_stay() -> None:
    layer = local_layer()
    layer.submodules.input_layernorm = torch.nn.Identity
    assert norms(with_sequence_parallel_norm(layer))[0] is torch.nn.Identity
