# SPDX-License-Identifier: Apache-2.0
"""Writes the recipes: one file for each model and length.

    python -m examples.recipes

A test holds the files against this script. `examples.plan_table` writes the table that says what each needs.
"""

import sys

from examples.recipe_models import RECIPES, Model, Recipe
from megatron_csbp.transformer.delta_net.traffic import DeltaNetSizes


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
# {model.gpus} H200 ({nodes}): {data_parallel}{recipe.topology}. More GPUs add data parallelism.{_hybrid_note(model)}
# Give on the command line: --data-path, --tokenizer-model, --save, --load, --pretrained-checkpoint. See ../README.md.

model:
  num-layers: {model.layers}
  hidden-size: {model.hidden}
  ffn-hidden-size: {model.ffn}
  num-attention-heads: {model.heads}
  group-query-attention: true
  num-query-groups: {model.key_heads}
  kv-channels: {model.head}
  swiglu: true
  disable-bias-linear: true
  normalization: RMSNorm
{_family(recipe)}
  seq-length: {recipe.tokens}

{_tokenizer(model)}

{_objective(model)}

parallelism:
{_tensor_parallelism(model)}  context-parallel-size: {recipe.group}
  bp-size: {recipe.group}
  use-distributed-optimizer: true
  dist-ckpt-optim-fully-reshardable: true  # a resume may have other tensor- and pipeline-parallel sizes
  overlap-grad-reduce: true
  overlap-param-gather: true
  recompute-granularity: full
  recompute-method: uniform
  recompute-num-layers: 1

{_training(recipe)}"""


def _hybrid_note(model: Model) -> str:
    if model.delta_net is None:
        return ""
    lines = ["", "# Three of four layers are gated delta nets, whose kernels need: pip install 'megatron-csbp[fla]'."]
    return "\n".join(lines)


def _tensor_parallelism(model: Model) -> str:
    if model.tensor == 1:
        return ""
    return f"  tensor-model-parallel-size: {model.tensor}\n  sequence-parallel: true\n"


def _hybrid(sizes: DeltaNetSizes) -> list[str]:
    return [
        "rotary-percent: 0.25",
        "apply-layernorm-1p: true",
        "attention-output-gate: true",
        "experimental-attention-variant: gated_delta_net",
        "linear-attention-freq: 4",
        f"linear-conv-kernel-dim: {sizes.look_back + 1}",
        f"linear-key-head-dim: {sizes.key_dim}",
        f"linear-value-head-dim: {sizes.value_dim}",
        f"linear-num-key-heads: {sizes.key_heads}",
        f"linear-num-value-heads: {sizes.value_heads}",
    ]


def _family(recipe: Recipe) -> str:
    model = recipe.model
    lines = [f"rotary-base: {model.theta}"]
    if model.delta_net is not None:
        lines = ["norm-epsilon: 1.0e-6", "qk-layernorm: true", *lines, *_hybrid(model.delta_net)]
        lines += ["position-embedding-type: rope", "max-position-embeddings: 262144"]
    elif model.is_qwen:
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
    rows = 248_320 if model.delta_net is not None else 151_936 if model.is_qwen else 131_072
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
    lines = [f"diffusion-block-size: {model.block}"]
    if model.is_qwen:
        mask = 151_669 if model.delta_net is None else 248_077
        lines += [f"# The first id behind the tokenizer's own {mask:,}: no text has it.", f"mask-token-id: {mask}"]
        lines += ["diffusion-objective: fast-dllm-v2"]
    else:
        lines += ["mask-token-id: 100", "diffusion-objective: nemotron"]
        lines += ["diffusion-loss-weight: 0.3", "ar-loss-weight: 1.0"]
    return "block_diffusion:\n" + "\n".join(f"  {line}" for line in lines)


def main() -> int:
    """Write the recipes."""
    for recipe in RECIPES:
        recipe.path.parent.mkdir(exist_ok=True)
        recipe.path.write_text(text(recipe))
    return 0


if __name__ == "__main__":
    sys.exit(main())
