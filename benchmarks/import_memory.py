# SPDX-License-Identifier: Apache-2.0
"""Peak memory of `python -m megatron_csbp.weights import` and `export`.

    python -m benchmarks.import_memory [--gigabytes 2] [--folder FOLDER]

Makes a synthetic Qwen3 checkpoint of that size (bf16, random), imports it, exports the import, and
prints the peak resident memory of each process beyond that of a bare Python interpreter, with what PyTorch alone
takes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_csbp.weights.families import QWEN3
from megatron_csbp.weights.model_arguments import arguments_from_config
from megatron_csbp.weights.model_shape import shape_from_arguments
from megatron_csbp.weights.rules import pieces
from megatron_csbp.weights.safetensors_writer import SafetensorsWriter

ROOT = Path(__file__).parents[1]
_CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_ONE_PROCESS = """
import pathlib, re, runpy, sys, threading, time
status = pathlib.Path("/proc/self/status")
peaks = {"VmHWM": 0, "RssAnon": 0}
def look():
    text = status.read_text()
    for name in peaks:
        peaks[name] = max(peaks[name], int(re.search(name + r":\\s+(\\d+)", text)[1]))
def watch():
    while True:
        look()
        time.sleep(0.005)
threading.Thread(target=watch, daemon=True).start()
sys.argv = sys.argv[1:]
try:
    for module in sys.argv.pop(0).split():
        __import__(module)
    if sys.argv:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
except SystemExit as leaving:
    assert not leaving.code, leaving.code
look()
# Not getrusage: its figure begins with that of the process which started this one.
print("peak", peaks["VmHWM"], peaks["RssAnon"])
"""


@dataclass(frozen=True)
class Measured:
    """A process.

    Attributes:
        resident_bytes: peak resident memory, with the pages of shared libraries.
        anonymous_bytes: peak of what is no file's.
        seconds: time.
    """

    resident_bytes: int
    anonymous_bytes: int
    seconds: float


def write_model(folder: Path, size_bytes: int, layers: int | None = None) -> int:
    """Write a synthetic model of about this size and return its bytes.

    Args:
        folder: has to exist.
        size_bytes: of the tensors.
        layers: number of layers, instead of what the size needs.
    """
    one = _tensors(_CONFIG | {"num_hidden_layers": 1})
    two = _tensors(_CONFIG | {"num_hidden_layers": 2})
    layer_bytes = _bytes(two) - _bytes(one)
    count = layers or max(1, round((size_bytes - _bytes(one)) / layer_bytes) + 1)
    config = _CONFIG | {"num_hidden_layers": count}
    tensors = _tensors(config)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    with SafetensorsWriter(folder, tensors) as writer:
        for name, (shape, dtype) in tensors.items():
            writer.write(name, torch.randn(shape, generator=generator).to(dtype))
    return _bytes(tensors)


def measure(modules: str, *command: str) -> Measured:
    """Import modules in a process of its own, then run a command there, if there is one."""
    started = time.monotonic()
    words = [sys.executable, "-W", "ignore", "-c", _ONE_PROCESS, modules, *command]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{run.stderr[-2000:]}")
    resident, anonymous = (int(number) * 1024 for number in run.stdout.rsplit("peak", 1)[1].split())
    return Measured(resident, anonymous, time.monotonic() - started)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.import_memory", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the synthetic checkpoint")
    parser.add_argument("--folder", type=Path, help="where to write it; a temporary folder by default")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        source, checkpoint, exported = (Path(place) / name for name in ("source", "checkpoint", "exported"))
        source.mkdir()
        size = write_model(source, int(args.gigabytes * 10**9))
        bare, libraries = measure(""), measure("torch torch.distributed.checkpoint")
        weights = "megatron_csbp.weights"
        runs = {
            "import": measure("", weights, "import", "--from", str(source), "--save", str(checkpoint)),
            "export": measure("", weights, "export", "--load", str(checkpoint), "--to", str(exported)),
        }
    print(f"checkpoint of {size / 10**9:.2f} GB; peaks beyond a bare interpreter:")
    for name, run in {"PyTorch, idle": libraries, **runs}.items():
        resident = (run.resident_bytes - bare.resident_bytes) / 10**6
        anonymous = (run.anonymous_bytes - bare.anonymous_bytes) / 10**6
        print(f"{name}: {anonymous:.0f} MB anonymous, {resident:.0f} MB with pages of libraries; {run.seconds:.0f} s")
    return 0


def _tensors(config: dict[str, object]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    arguments = arguments_from_config(QWEN3.config, config, 128)
    shape = shape_from_arguments(arguments, 32_000)
    return {
        name: (size, torch.bfloat16)
        for piece in pieces(QWEN3.rules, QWEN3.body, shape)
        for name, size in zip(piece.names, piece.part_shapes, strict=True)
    }


def _bytes(tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in tensors.values())


if __name__ == "__main__":
    sys.exit(main())
