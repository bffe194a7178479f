# SPDX-License-Identifier: Apache-2.0
"""Megatron's Transformer Engine layers with this package's attention, over a stand-in for the package itself.

What runs here is Megatron's own specs, layer classes and checkpoints of `--transformer-impl transformer_engine`. The
arithmetic below them is the stand-in's; no kernel of Transformer Engine runs on a CPU.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_csbp.weights.importing import import_weights
from tests.functional.model_flags import BLOCK_DIFFUSION, CSBP2, HYBRID, TP2, UNTIED_MQA, iterations, words
from tests.functional.test_parity import CURVE_TOLERANCE
from tests.functional.test_weights import BLOCKS, RUN
from tests.support.checkpoint_tensors import load_parameters
from tests.support.hugging_face_models import make_model
from tests.support.megatron_run import Finished, Ranks, worst_difference

TE = words("--transformer-impl transformer_engine --qk-layernorm")
MOE = words(
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type none"
)
STAND_STILL = words("--lr 0 --min-lr 0 --weight-decay 0")
AS_THEY_ARE = words("--init-mask-token keep")


@pytest.fixture(scope="module")
def te_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    server = Ranks(tmp_path_factory.mktemp("ranks"), "tests.support.transformer_engine_server")
    yield server
    server.close()


def load(folder: Path) -> list[str]:
    return ["--load", str(folder), "--finetune", "--no-load-optim", "--no-load-rng"]


def one_step(ranks: Ranks, flags: list[str], folder: Path) -> Finished:
    return ranks.train([*flags, *iterations(1), "--save", str(folder), "--no-save-optim"]).check()


@pytest.mark.parametrize(
    "experts", [pytest.param([], id="dense"), pytest.param(MOE, id="experts", marks=pytest.mark.slow)]
)
def test_a_checkpoint_goes_from_stock_to_block_diffusion_and_back(
    experts: list[str], te_ranks: Ranks, tmp_path: Path
) -> None:
    stock = [*UNTIED_MQA, *TE, *experts]
    one_step(te_ranks, stock, tmp_path / "stock")
    conversion = [*BLOCK_DIFFUSION, *load(tmp_path / "stock"), *STAND_STILL, *AS_THEY_ARE]
    one_step(te_ranks, [*stock, *conversion], tmp_path / "diffusion")
    one_step(te_ranks, [*stock, *load(tmp_path / "diffusion"), *STAND_STILL], tmp_path / "back")
    parameters, diffusion, back = (load_parameters(tmp_path / run, 1) for run in ("stock", "diffusion", "back"))
    assert parameters.keys() == diffusion.keys() == back.keys()
    for name, tensor in parameters.items():
        assert torch.equal(diffusion[name], tensor), name
        assert torch.equal(back[name], tensor), name
    # Names that only the layers of Transformer Engine have: norms inside of linear layers.
    assert any(name.endswith("self_attention.linear_qkv.layer_norm_weight") for name in parameters)
    assert any(name.endswith("mlp.linear_fc1.layer_norm_weight") for name in parameters) == (not experts)
    assert any(name.endswith("q_layernorm.weight") for name in parameters)


def test_every_topology_trains_like_one_rank(te_ranks: Ranks, tmp_path: Path) -> None:
    model = [*UNTIED_MQA, *TE, *BLOCK_DIFFUSION]
    one_step(te_ranks, model, tmp_path)
    model = [*model, *load(tmp_path), *iterations(3)]
    expected = te_ranks.train(model).check()
    for flags, world_size in (([*TP2, "--sequence-parallel", *CSBP2], 4), (["--bp-size", "2"], 2)):
        found = te_ranks.train([*model, *flags, *words("--recompute-granularity selective")], world_size).check()
        assert "last layer: in training, clean rows end at their keys and values" in found.output
        assert worst_difference(found.losses(), expected.losses()) < CURVE_TOLERANCE
        assert worst_difference(found.grad_norms, expected.grad_norms) < CURVE_TOLERANCE


def test_gated_delta_nets_are_the_same_in_either_kind_of_layer(te_ranks: Ranks, ranks: Ranks, tmp_path: Path) -> None:
    """Megatron's own spec of such models, which has these layers only, and ours of its local layers."""
    model, te = [*HYBRID, *BLOCK_DIFFUSION], words("--transformer-impl transformer_engine")
    one_step(te_ranks, [*model, *te], tmp_path)
    model += [*load(tmp_path), *iterations(2)]
    expected = ranks.train(model).check()
    found = te_ranks.train([*model, *te, *CSBP2], 2).check()
    assert worst_difference(found.losses(), expected.losses()) < CURVE_TOLERANCE
    assert worst_difference(found.grad_norms, expected.grad_norms) < CURVE_TOLERANCE


@pytest.mark.slow
def test_an_import_of_gated_delta_nets_loads_in_either_kind_of_layer(
    te_ranks: Ranks, ranks: Ranks, tmp_path: Path
) -> None:
    """With the extra states that each asks for, from tensors of two dtypes, as they are published."""
    source, checkpoint = make_model("qwen3.5", tmp_path / "source", torch.bfloat16), tmp_path / "checkpoint"
    file = source / "model.safetensors"
    tensors = load_file(file)
    mixed = {name: tensor.float() if name.endswith("A_log") else tensor for name, tensor in tensors.items()}
    save_file(mixed, file, metadata={"format": "pt"})
    import_weights(source, checkpoint, mask_token="189")
    run = [
        *RUN,
        *BLOCKS,
        "--yaml-cfg",
        str(checkpoint / "model.yaml"),
        *load(checkpoint),
        *iterations(2),
        *STAND_STILL,
    ]
    expected = ranks.train(run).check()
    found = te_ranks.train([*run, *words("--transformer-impl transformer_engine")]).check()
    assert worst_difference(found.losses(), expected.losses()) < CURVE_TOLERANCE
    half = ranks.train([*run, "--bf16"]).check()
    assert worst_difference(half.losses(), expected.losses()) < 0.02
