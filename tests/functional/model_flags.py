# SPDX-License-Identifier: Apache-2.0
"""The small models that the functional tests train, as command lines."""


def words(text: str) -> list[str]:
    """Return a command line as a list."""
    return text.split()


MODEL = words(
    "--hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope --seq-length 64 --max-position-embeddings 64 "
    "--tokenizer-type NullTokenizer --vocab-size 187 --make-vocab-size-divisible-by 32 --group-query-attention"
)
"""Sizes of the decoder, but for the number of layers and of key/value heads. The vocabulary has 188 tokens, with that
for the end of a document, and 192 with padding, whether for one tensor-parallel rank or for two."""

TRAINING = words(
    "--mock-data --split 90,5,5 --num-workers 0 --lr-decay-style cosine --lr 2e-3 --min-lr 2e-4 --lr-warmup-iters 3 "
    "--lr-decay-iters 20 --adam-eps 1e-5 --log-interval 1 --seed 7 --eval-interval 10 --save-interval 1000"
)
"""With Adam's usual epsilon of 1e-8 a gradient that is only rounding noise moves its weight as far as any other, so
that two correct runs drift apart by 5e-6 in the gradient norm; with 1e-5 they stay within 5e-7."""

BLOCKS = words("--diffusion-block-size 8 --mask-token-id 190")
NEMOTRON = [*BLOCKS, "--diffusion-objective", "nemotron"]
BLOCK_DIFFUSION = [*BLOCKS, "--diffusion-objective", "block-diffusion"]

TIED = [*MODEL, *TRAINING, *words("--num-layers 2 --num-query-groups 2 --micro-batch-size 1 --global-batch-size 2")]
"""Two layers, two key/value heads, tied embeddings."""

UNTIED_MQA = [
    *MODEL,
    *TRAINING,
    *words("--num-layers 2 --num-query-groups 1 --micro-batch-size 2 --global-batch-size 4"),
    "--untie-embeddings-and-output-weights",
]
"""Two layers, one key/value head, separate embeddings, two sequences in a micro-batch."""

DEEP = [*MODEL, *TRAINING, *words("--num-layers 4 --num-query-groups 2 --micro-batch-size 1 --global-batch-size 4")]
"""Four layers and four micro-batches, for the interleaved pipeline."""

MOE = [
    *TIED,
    *words("--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall"),
    *words("--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"),
]
"""The first model with four experts instead of each MLP, and a router that balances them."""

HYBRID = [
    *MODEL,
    *TRAINING,
    *words("--num-layers 4 --num-query-groups 2 --micro-batch-size 1 --global-batch-size 2 --kv-channels 32"),
    *words("--untie-embeddings-and-output-weights --attention-output-gate --qk-layernorm --apply-layernorm-1p"),
    *words("--rotary-percent 0.25 --experimental-attention-variant gated_delta_net --linear-attention-freq 4"),
    *words("--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 16 --linear-value-head-dim 8"),
]
"""Three gated delta nets and a full attention as Qwen3.5 has them: output gate, zero-centred norms, partial RoPE."""

CSBP2 = words("--bp-size 2 --context-parallel-size 2")
CSBP4 = words("--bp-size 4 --context-parallel-size 4")
TP2 = words("--tensor-model-parallel-size 2")
PP2 = words("--pipeline-model-parallel-size 2")


def iterations(number: int, evaluate: bool = False) -> list[str]:
    """Return the flags of a run of this length."""
    return ["--train-iters", str(number), "--eval-iters", str(int(evaluate))]
