# SPDX-License-Identifier: Apache-2.0
"""Safetensors and torch_dist files, written and read piece by piece."""

import json
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.import_memory import write_model
from megatron_csbp.weights import safetensors_writer
from megatron_csbp.weights.__main__ import main
from megatron_csbp.weights.comparison import check_tensors
from megatron_csbp.weights.importing import import_weights
from megatron_csbp.weights.model_shape import ModelShape
from megatron_csbp.weights.rules import Part, TensorRule, pieces
from megatron_csbp.weights.safetensors_reader import SafetensorsFolder
from megatron_csbp.weights.safetensors_writer import SafetensorsWriter
from megatron_csbp.weights.torch_dist_reader import TorchDistCheckpoint
from megatron_csbp.weights.torch_dist_writer import FIRST_ITERATION, write_checkpoint
from megatron_csbp.weights.whole_folder import whole_folder
from tests.support.hugging_face_models import make_model
from tests.support.megatron_run import ROOT

TENSORS = {
    "b": torch.arange(12, dtype=torch.float32).view(3, 4),
    "a": torch.randn(5, 2).to(torch.bfloat16),
    "c": torch.randn(7),
    "scalar": torch.tensor(3.0),
}
PLAN = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_model("qwen3", tmp_path / "source")


def test_a_file_written_tensor_by_tensor_is_the_librarys(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "expected.safetensors", metadata={"format": "pt"})
    with SafetensorsWriter(tmp_path, PLAN) as writer:
        for name in ("c", "a", "scalar", "b"):  # any order
            writer.write(name, TENSORS[name])
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "expected.safetensors").read_bytes()


def test_large_models_are_cut_into_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_writer, "LARGEST_FILE_BYTES", 60)
    with SafetensorsWriter(tmp_path, PLAN) as writer:
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    assert len(set(index["weight_map"].values())) == 2
    folder = SafetensorsFolder(tmp_path)
    assert all(folder.read(name).equal(tensor) for name, tensor in TENSORS.items())
    for file in set(index["weight_map"].values()):
        with safe_open(tmp_path / file, framework="pt") as opened:  # the library finds them sound
            assert {index["weight_map"][name] for name in opened.keys()} == {file}  # noqa: SIM118


def test_a_tensor_is_written_and_read_in_parts(tmp_path: Path) -> None:
    save_file({"b": TENSORS["b"]}, tmp_path / "expected.safetensors", metadata={"format": "pt"})
    with SafetensorsWriter(tmp_path, {"b": PLAN["b"]}) as writer:
        writer.write("b", TENSORS["b"][1:], 1)
        writer.write("b", TENSORS["b"][:1], 0)
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "expected.safetensors").read_bytes()
    assert SafetensorsFolder(tmp_path).read("b", 1, 2).equal(TENSORS["b"][1:])


def test_a_tensor_of_which_a_part_was_never_written_is_noticed(tmp_path: Path) -> None:
    def write_all_but_a_row() -> None:
        with SafetensorsWriter(tmp_path, PLAN) as writer:
            for name in ("a", "c", "scalar"):
                writer.write(name, TENSORS[name])
            writer.write("b", TENSORS["b"][:2], 0)

    with pytest.raises(AssertionError, match=r"never written: \['b'\]"):
        write_all_but_a_row()


def test_a_tensor_that_was_never_written_is_noticed(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match=r"never written: \['a', 'b', 'scalar'\]"),
        SafetensorsWriter(tmp_path, PLAN) as writer,
    ):
        writer.write("c", TENSORS["c"])


def test_a_checkpoint_gives_back_any_region(tmp_path: Path) -> None:
    rules = (TensorRule("weight", (Part("{layer}", "rows columns"),), also=("same",)),)
    shape = ModelShape({"rows": 4, "columns": 3}, (frozenset(), frozenset()), False)
    parts = list(pieces(rules, "", shape))
    layers = torch.randn(2, 4, 3)
    dtypes = dict.fromkeys(parts[0].keys, torch.float32)
    made = []

    def make(piece: object) -> torch.Tensor:
        made.append(piece)
        return layers[len(made) - 1].clone()

    write_checkpoint(tmp_path, parts, make, dtypes, ["state/shard_0_1"], Namespace(num_layers=2))  # type: ignore[arg-type]
    assert len(made) == 2  # once, though each is written under two keys
    checkpoint = TorchDistCheckpoint(tmp_path / FIRST_ITERATION)
    assert checkpoint.tensors == {f"decoder.layers.{key}": ((2, 4, 3), torch.float32) for key in ("weight", "same")}
    for key in checkpoint.tensors:
        assert checkpoint.read(key, (0, 1, 0), (2, 2, 3)).equal(layers[:, 1:3])


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(
        ValueError, match=r"no model\.safetensors\. It has pytorch_model\.bin: pickled weights are not read"
    ):
        SafetensorsFolder(tmp_path)


def test_a_damaged_file_is_refused(tmp_path: Path, source: Path) -> None:
    file = source / "model.safetensors"
    for damaged in (file.read_bytes()[:-8], b"\xff" * 100, b""):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="cannot be read as safetensors"):
            SafetensorsFolder(source)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"x is of dtype I8; only F64, F32, F16, BF16 can be imported"):
        SafetensorsFolder(tmp_path)


def test_differences_are_all_listed() -> None:
    expected = {"a": (1, 2), "b": (3,), "c": (4,)}
    with pytest.raises(ValueError, match="x does not fit y") as caught:
        check_tensors(expected, {"a": (2, 1), "c": (4,), "d": (5,)}, "x", "y")
    assert "1 missing (b); 1 unexpected (d); 1 of another shape (a is [2, 1] and should be [1, 2])" in str(
        caught.value
    )


def change_config(source: Path, **change: object) -> None:
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.mark.parametrize(
    "change, said",
    [
        ({"num_hidden_layers": 3}, "11 missing (model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "11 unexpected (model.layers.1.input_layernorm.weight"),
        ({"intermediate_size": 128}, "is [96, 64] and should be [128, 64]"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
        ({"model_type": "gpt2"}, "has no table here"),
    ],
)
def test_a_model_that_does_not_fit_leaves_nothing_behind(
    source: Path, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    change_config(source, **change)
    with pytest.raises(ValueError, match=re.escape(said)):
        import_weights(source, tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_existing_folder_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    import_weights(source, tmp_path / "checkpoint")  # an empty folder is none
    with pytest.raises(ValueError, match="exists and is not empty; nothing is overwritten"):
        import_weights(source, tmp_path / "checkpoint")


def test_a_folder_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    def stop_halfway() -> None:
        with whole_folder(tmp_path / "target", "--save") as folder:
            (folder / "half").touch()
            assert not (tmp_path / "target").exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_halfway()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "asked, expected",
    [
        (None, None),  # neither config.json nor a tokenizer names one
        ("17", 17),
        ("190", "has no row in the embedding, which has 190"),
        ("<mask>", "has no tokenizer that knows it"),
    ],
)
def test_the_mask_token_has_a_row(asked: str | None, expected: int | str | None, source: Path, tmp_path: Path) -> None:
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            import_weights(source, tmp_path / "checkpoint", mask_token=asked)
        return
    import_weights(source, tmp_path / "checkpoint", mask_token=asked)
    text = (tmp_path / "checkpoint" / "model.yaml").read_text()
    assert (f"mask-token-id: {expected}\n" in text) == (expected is not None)


def test_an_import_can_change_the_dtype(source: Path, tmp_path: Path) -> None:
    import_weights(source, tmp_path / "checkpoint", dtype=torch.bfloat16)
    checkpoint = TorchDistCheckpoint(tmp_path / "checkpoint" / FIRST_ITERATION)
    assert {dtype for _, dtype in checkpoint.tensors.values()} == {torch.bfloat16}
    embedding = checkpoint.read("embedding.word_embeddings.weight", (0, 0), (192, 64))
    assert embedding[:190].equal(SafetensorsFolder(source).read("model.embed_tokens.weight").to(torch.bfloat16))
    assert embedding[190:].eq(0).all()


def test_norms_that_megatron_rounds_are_counted(tmp_path: Path) -> None:
    """It keeps them less one, so that small ones lose bits; of the whole model nothing else is left out unsaid."""
    source = make_model("qwen3.5-tied-whole", tmp_path / "source", torch.bfloat16)
    file = source / "model.safetensors"
    tensors = load_file(file)
    tensors["model.language_model.layers.1.linear_attn.norm.weight"][:3] = 0.1
    save_file(tensors, file, metadata={"format": "pt"})
    lines = import_weights(source, tmp_path / "checkpoint")
    assert "left out 2 tensors of multi-token prediction (mtp.*)" in lines
    assert "left out 21 tensors of the vision encoder (model.visual.*)" in lines
    assert [line for line in lines if line.startswith("3 entries of the norms of gated delta nets are rounded")]
    exact = import_weights(source, tmp_path / "exact", dtype=torch.float32)
    assert not [line for line in exact if "are rounded" in line]


PEAK = """
import pathlib, re, sys, threading, time
from megatron_csbp.weights.importing import import_weights
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
before, peak = anonymous(), 0
def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
import_weights(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
print(peak - before)
"""


def test_an_import_takes_the_memory_of_one_tensor_and_one_layer(tmp_path: Path) -> None:
    """About one tensor and one layer, of a model of 433 MB: the embedding has 131 MB, a layer 101 MB."""
    (tmp_path / "source").mkdir()
    size = write_model(tmp_path / "source", 0, layers=3)
    command = [sys.executable, "-W", "ignore", "-c", PEAK, str(tmp_path / "source"), str(tmp_path / "checkpoint")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert size > 430e6
    assert int(run.stdout.split()[-1]) < 240e6


def test_a_mistake_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["import", "--from", str(tmp_path), "--save", str(tmp_path / "x")])
    assert leaving.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "is not the folder of a Hugging Face model: it has no config.json" in said[0]
