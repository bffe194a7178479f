# SPDX-License-Identifier: Apache-2.0
"""Weights of Hugging Face models: imported into any topology, trained, exported and imported again."""

import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_csbp.weights.importing import import_weights
from tests.functional.model_flags import CSBP2, PP2, TP2, iterations, words
from tests.support.hugging_face_models import VOCABULARY, make_model
from tests.support.megatron_run import Finished, Ranks

KINDS = ("qwen3-tied", "qwen3", "qwen3-moe", "qwen3-moe-mixed", "qwen3.5", "nemotron")
WHOLE = "qwen3.5-tied-whole"
TOLERANCE = 1e-5
RUN = words(
    "--seq-length 64 --tokenizer-type NullTokenizer --vocab-size 187 --mock-data --split 90,5,5 --num-workers 0 "
    "--micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --min-lr 1e-4 --lr-decay-iters 20 --log-interval 1 --seed 7 "
    "--eval-interval 100 --save-interval 1000"
)
BLOCKS = words("--diffusion-block-size 8")
AUTOREGRESSIVE_CLEAN_ROWS = words("--diffusion-block-size 1 --mask-token-id 189 --clean-attention token-causal")
"""As which models with gated delta nets run here, since Megatron's own layer needs a GPU."""
EP2 = words("--expert-model-parallel-size 2")


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Makes and imports a model of a kind, once; returns its folder and the checkpoint's."""
    place = tmp_path_factory.mktemp("weights")

    @functools.cache
    def make(kind: str) -> tuple[Path, Path]:
        source = make_model(kind, place / f"{kind}-source")
        import_weights(source, place / kind, mask_token="189")
        return source, place / kind

    return make


def weights(ranks: Ranks, *arguments: object) -> Finished:
    return ranks.call("tests.support.weights_probe:command", [str(word) for word in arguments])


def without_diffusion(checkpoint: Path) -> Path:
    """Write the model's flags without those that only block diffusion takes."""
    file = checkpoint.with_suffix(".yaml")
    file.write_text((checkpoint / "model.yaml").read_text().partition("block_diffusion:")[0])
    return file


def transformers_logits(source: Path, tokens: Tensor) -> Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        logits: Tensor = model(tokens).logits
    return logits


@pytest.mark.parametrize("kind", [*KINDS, pytest.param(WHOLE, marks=pytest.mark.slow)])
def test_check_finds_the_logits_of_transformers_in_an_import(
    kind: str, ranks: Ranks, imported: Callable[[str], tuple[Path, Path]]
) -> None:
    source, checkpoint = imported(kind)
    run = weights(ranks, "check", "--from", source, "--load", checkpoint).check()
    found = re.search(r"equal: largest difference of logits (\S+),", run.output)
    assert found is not None, run.output
    assert float(found[1]) < TOLERANCE


@pytest.mark.parametrize(
    "kind, topology",
    [
        ("qwen3-tied", TP2),
        ("qwen3-tied", PP2),
        ("qwen3-moe", EP2),
        ("qwen3-moe-mixed", PP2),
        ("qwen3.5", [*TP2, *AUTOREGRESSIVE_CLEAN_ROWS]),
        pytest.param("qwen3.5", [*PP2, *AUTOREGRESSIVE_CLEAN_ROWS], marks=pytest.mark.slow),
    ],
    ids=["tp2", "pp2", "ep2", "pp2-mixed-layers", "tp2-delta-nets", "pp2-delta-nets"],
)
def test_a_run_in_any_topology_loads_an_import(
    kind: str, topology: list[str], ranks: Ranks, imported: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    source, checkpoint = imported(kind)
    tokens = torch.randint(VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(1))
    torch.save(tokens, tmp_path / "tokens.pt")
    load = ["--yaml-cfg", str(without_diffusion(checkpoint)), "--load", str(checkpoint), "--finetune"]
    arguments = [*RUN, *load, *iterations(1), *topology]
    ranks.call("tests.support.weights_probe:logits", {"arguments": arguments, "folder": str(tmp_path)}, 2).check()
    logits = torch.load(tmp_path / "logits.pt")[..., :VOCABULARY]
    assert (logits - transformers_logits(source, tokens)).abs().max() < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_the_export_of_an_import_is_the_original_byte_for_byte(
    kind: str, ranks: Ranks, imported: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    source, checkpoint = imported(kind)
    weights(ranks, "export", "--load", checkpoint, "--to", tmp_path / "export").check()
    files = sorted(path.name for path in source.iterdir())
    assert sorted(path.name for path in (tmp_path / "export").iterdir()) == files
    different = [name for name in files if (source / name).read_bytes() != (tmp_path / "export" / name).read_bytes()]
    assert different == []


def test_the_text_model_of_a_larger_one_is_imported_and_exported_by_itself(
    ranks: Ranks, imported: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    source, checkpoint = imported(WHOLE)
    for name, like in (("export", []), ("like", ["--like", source])):
        run = weights(ranks, "export", "--load", checkpoint, "--to", tmp_path / name, *like).check()
        assert ("the text model alone, as qwen3_5_text" in run.output) == (like != [])
        found, expected = load_file(tmp_path / name / "model.safetensors"), load_file(source / "model.safetensors")
        renamed = {key.replace("model.", "model.language_model.", 1): tensor for key, tensor in found.items()}
        assert renamed.keys() == {key for key in expected if not key.startswith(("mtp.", "model.visual."))}
        assert all(tensor.equal(expected[key]) for key, tensor in renamed.items())
    tokens = torch.arange(24)[None]
    whole, text = (transformers_logits(folder, tokens) for folder in (source, tmp_path / "export"))
    assert whole.equal(text)


def test_training_goes_on_the_same_after_a_detour_through_hugging_face(
    ranks: Ranks, imported: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    source, checkpoint = imported("qwen3-tied")
    flags = [*RUN, "--yaml-cfg", str(checkpoint / "model.yaml"), *BLOCKS, *CSBP2]
    first = [*flags, *iterations(20), "--load", str(checkpoint), "--finetune", "--save", str(tmp_path / "run")]
    trained = ranks.train(first, 2).check()
    assert trained.losses()[-1] != trained.losses()[0]

    weights(ranks, "export", "--load", tmp_path / "run", "--to", tmp_path / "export").check()
    run = weights(ranks, "check", "--from", tmp_path / "export", "--load", tmp_path / "run").check()
    found = re.search(r"equal: largest difference of logits (\S+),", run.output)
    assert found is not None, run.output
    assert float(found[1]) < TOLERANCE
    tokens = torch.arange(24)[None]
    before, after = (transformers_logits(folder, tokens) for folder in (source, tmp_path / "export"))
    assert (before - after).abs().max() > 0.01

    import_weights(tmp_path / "export", tmp_path / "again")
    losses = {}
    for name in ("run", "again"):
        more = [*flags, *iterations(3), "--load", str(tmp_path / name), "--finetune"]
        losses[name] = ranks.train(more, 2).check().losses()
    assert losses["run"] == losses["again"]


def test_a_diffusion_model_trains_on_with_its_own_flags_alone(
    ranks: Ranks, imported: Callable[[str], tuple[Path, Path]]
) -> None:
    _, checkpoint = imported("nemotron")
    flags = [*RUN, "--yaml-cfg", str(checkpoint / "model.yaml"), "--load", str(checkpoint), *iterations(1)]
    run = ranks.train([*flags, "--finetune"]).check()
    assert run.losses("ar loss")[0] > 0.0
    refused = ranks.train(flags)
    assert refused.returncodes == [2]
    assert "there is no optimizer state to resume from" in refused.output
    assert "--finetune to start a new run from these weights" in refused.output


def test_another_model_than_the_import_is_refused(
    ranks: Ranks, imported: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    _, tied = imported("qwen3-tied")
    other, _ = imported("qwen3")
    run = weights(ranks, "export", "--load", tied, "--to", tmp_path / "export", "--like", other)
    assert run.returncodes == [2]
    assert "untie_embeddings_and_output_weights is False and there True" in run.output
    assert not list(tmp_path.iterdir())


def test_check_says_where_weights_differ(
    ranks: Ranks, imported: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    source, checkpoint = imported("qwen3")
    changed = tmp_path / "changed"
    changed.mkdir()
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"] = tensors["model.layers.1.self_attn.q_proj.weight"].flip(0)
    save_file(tensors, changed / "model.safetensors")
    (changed / "config.json").write_text((source / "config.json").read_text())
    run = weights(ranks, "check", "--from", changed, "--load", checkpoint)
    assert run.returncodes == [1]
    assert "hidden states part in layer 1" in run.output
    assert "DIFFERENT: largest difference of logits" in run.output
