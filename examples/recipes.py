# SPDX-License-Identifier: Apache-2.0
"""Writes the recipes: one file for each model and length, and the table in README.md that says what each needs.

    python examples/recipes.py

A test holds the files against this script. Memory and bytes are computed from sizes, not measured.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).parent
LENGTHS = {"32k": 32_768, "128k": 131_072, "256k": 262_144}
BLOCK = 32
_GIB = 2**30


@dataclass(frozen=True)
class Model:
    """A published model.

    Attributes:
        folder: of its recipes.
        size: name of the size, as the files begin.
        layers: number of layers.
        hidden: hidden size.
        ffn: width of the MLP.
        heads: query heads.
        parameters: in all.
        tied: one tensor is embedding and output layer.
        theta: base of the rotary embedding.
        gpus: GPUs of the recipes; at least 8.
    """

    folder: str
    size: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    parameters: int
    tied: bool = False
    theta: int = 1_000_000
    gpus: int = 8

    @property
    def is_qwen(self) -> bool:
        """Whether it is Qwen3, and not Nemotron-Labs-Diffusion."""
        return self.folder == "qwen_ar_to_bdlm"

    @property
    def name(self) -> str:
        """The published name."""
        return f"Qwen3 {self.size.upper()}" if self.is_qwen else f"Nemotron-Labs-Diffusion {self.size.upper()}"


NEMOTRON, QWEN = "nemotron_diffusion", "qwen_ar_to_bdlm"
MODELS = (
    Model(NEMOTRON, "3b", 26, 3072, 9216, 32, 3_831_659_520),
    Model(NEMOTRON, "8b", 34, 4096, 14_336, 32, 8_489_553_920),
    Model(NEMOTRON, "14b", 40, 5120, 16_384, 32, 13_506_073_600, theta=1_000_000_000, gpus=16),
    Model(QWEN, "0.6b", 28, 1024, 3072, 16, 596_049_920, tied=True),
    Model(QWEN, "1.7b", 28, 2048, 6144, 16, 1_720_574_976, tied=True),
    Model(QWEN, "4b", 36, 2560, 9728, 32, 4_022_468_096, tied=True),
    Model(QWEN, "8b", 36, 4096, 12_288, 32, 8_190_735_360),
)
KEY_HEADS, HEAD = 8, 128


@dataclass(frozen=True)
class Recipe:
    """A model at one length.

    Attributes:
        model: the model.
        length: name of the length, as the file ends.
    """

    model: Model
    length: str

    @property
    def tokens(self) -> int:
        """Clean tokens of a sequence, L."""
        return LENGTHS[self.length]

    @property
    def group(self) -> int:
        """Ranks of the context group, P."""
        return 2 if self.length == "32k" else 8

    @property
    def copies(self) -> int:
        """Rows of a token: its clean one and one for each corrupted view."""
        return 3 if self.model.is_qwen else 2

    @property
    def path(self) -> Path:
        """The file."""
        return EXAMPLES / self.model.folder / f"{self.model.size}_{self.length}.yaml"

    @property
    def data_parallel(self) -> int:
        """Sequences that are trained at the same time."""
        return self.model.gpus // self.group

    @property
    def sequences(self) -> int:
        """Sequences of a step: about 2 million tokens, 4 million at the longest."""
        return {"32k": 64, "128k": 16, "256k": 16}[self.length]

    def state_gib(self) -> float:
        """GiB of a GPU for bf16 weights, fp32 gradients, and its share of fp32 weights and Adam's moments."""
        return self.model.parameters * (2 + 4 + 12 / self.model.gpus) / _GIB

    def saved_gib(self) -> float:
        """GiB of a GPU for the inputs of all layers, which full recomputation keeps."""
        rows = self.copies * self.tokens // self.group
        return rows * self.model.hidden * 2 * self.model.layers / _GIB

    def received_gib(self) -> float:
        """GiB of keys, values and their gradients that a GPU gets from others for each sequence."""
        share = (self.group - 1) / self.group
        return 3 * share * self.tokens * 2 * KEY_HEADS * HEAD * 2 * self.model.layers / _GIB


RECIPES = tuple(Recipe(model, length) for model in MODELS for length in LENGTHS)


def text(recipe: Recipe) -> str:
    """Return the file of a recipe."""
    model = recipe.model
    what = (
        "from an autoregressive to a block-diffusion model (Fast-dLLM v2)" if model.is_qwen else "its own joint loss"
    )
    nodes = "one node" if model.gpus == 8 else "two nodes"
    data_parallel = f"DP {recipe.data_parallel} x " if recipe.data_parallel > 1 else ""
    return f"""\
# SPDX-License-Identifier: Apache-2.0
# {model.name} at {recipe.length.upper()}: {what}. Written by examples/recipes.py.
# {model.gpus} H200 ({nodes}): {data_parallel}CSBP {recipe.group}. More GPUs add data parallelism.
# Give on the command line: --data-path, --tokenizer-model, --save, --load, --pretrained-checkpoint. See ../README.md.

model:
  num-layers: {model.layers}
  hidden-size: {model.hidden}
  ffn-hidden-size: {model.ffn}
  num-attention-heads: {model.heads}
  group-query-attention: true
  num-query-groups: {KEY_HEADS}
  kv-channels: {HEAD}
  swiglu: true
  disable-bias-linear: true
  normalization: RMSNorm
{_family(recipe)}
  seq-length: {recipe.tokens}

{_tokenizer(model)}

{_objective(model)}

parallelism:
  context-parallel-size: {recipe.group}
  bp-size: {recipe.group}
  use-distributed-optimizer: true
  dist-ckpt-optim-fully-reshardable: true  # a resume may have other tensor- and pipeline-parallel sizes
  overlap-grad-reduce: true
  overlap-param-gather: true
  recompute-granularity: full
  recompute-method: uniform
  recompute-num-layers: 1

{_training(recipe)}"""


def _family(recipe: Recipe) -> str:
    model = recipe.model
    lines = [f"rotary-base: {model.theta}"]
    if model.is_qwen:
        lines = ["norm-epsilon: 1.0e-6", "qk-layernorm: true", *lines]
        if recipe.tokens > 40_960:  # beyond it, YaRN as published: from 32,768 on
            lines += ["position-embedding-type: yarn", f"rotary-scaling-factor: {recipe.tokens // 32_768}"]
            lines += ["yarn-original-max-position-embeddings: 32768", "yarn-beta-fast: 32", "yarn-beta-slow: 1"]
            lines += [f"max-position-embeddings: {recipe.tokens}"]
        else:
            lines += ["position-embedding-type: rope", "max-position-embeddings: 40960"]
    else:
        lines = ["norm-epsilon: 1.0e-5", *lines, "position-embedding-type: yarn", "rotary-scaling-factor: 16"]
        lines += ["yarn-original-max-position-embeddings: 16384", "yarn-beta-fast: 32", "yarn-beta-slow: 1"]
        lines += ["mscale: 1", "mscale-all-dim: 1", "# Queries are scaled by position from 16,384 on (Llama 4)."]
        lines += ["query-scale-beta: 0.1", "max-position-embeddings: 262144"]
    if not model.tied:
        lines.append("untie-embeddings-and-output-weights: true")
    return "\n".join(f"  {line}" for line in lines)


def _tokenizer(model: Model) -> str:
    rows = 151_936 if model.is_qwen else 131_072
    return f"tokenizer:\n  tokenizer-type: HuggingFaceTokenizer\n  padded-vocab-size: {rows}"


def _training(recipe: Recipe) -> str:
    model = recipe.model
    return f"""\
# A starting point, not a tuned recipe.
training:
  bf16: true
  micro-batch-size: 1
  global-batch-size: {recipe.sequences}
  train-iters: {2500 if model.is_qwen else 2000}
  lr: {"2.0e-5" if model.is_qwen else "1.0e-5"}
  min-lr: {"2.0e-6" if model.is_qwen else "1.0e-6"}
  lr-decay-style: cosine
  lr-warmup-iters: 100
  weight-decay: 0.1
  adam-beta2: 0.95
  clip-grad: 1.0
  # Without --finetune and with a checkpoint of its own, a run resumes: it keeps this seed.
  seed: 1234

log:
  log-interval: 10
  eval-interval: 500
  eval-iters: 8
  save-interval: 500
"""


def _objective(model: Model) -> str:
    lines = [f"diffusion-block-size: {BLOCK}"]
    if model.is_qwen:
        lines += ["# The first id behind the tokenizer's own 151,669: no text has it.", "mask-token-id: 151669"]
        lines += ["diffusion-objective: fast-dllm-v2"]
    else:
        lines += ["mask-token-id: 100", "diffusion-objective: nemotron"]
        lines += ["diffusion-loss-weight: 0.3", "ar-loss-weight: 1.0"]
    return "block_diffusion:\n" + "\n".join(f"  {line}" for line in lines)


def table() -> str:
    """Return the table of README.md."""
    lines = [
        "| recipe | H200 | topology | rows on a GPU | weights, gradients, optimizer | inputs of layers | received |",
        "|---|---|---|---|---|---|---|",
    ]
    for recipe in RECIPES:
        rows = recipe.copies * recipe.tokens // recipe.group
        topology = f"DP {recipe.data_parallel} x CSBP {recipe.group}"
        name = f"[`{recipe.path.relative_to(EXAMPLES)}`]({recipe.path.relative_to(EXAMPLES)})"
        lines.append(
            f"| {name} | {recipe.model.gpus} | {topology} | {rows:,} | {recipe.state_gib():.0f} GiB | "
            f"{recipe.saved_gib():.0f} GiB | {recipe.received_gib():.1f} GiB |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the recipes and print the table."""
    for recipe in RECIPES:
        recipe.path.parent.mkdir(exist_ok=True)
        recipe.path.write_text(text(recipe))
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
