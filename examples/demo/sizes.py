# SPDX-License-Identifier: Apache-2.0
"""How large the demo is: the model, the training, and the case of the paper that its bytes are put beside."""

from dataclasses import dataclass

NUM_RANKS = 2
BLOCK_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model shaped like Nemotron-Labs-Diffusion (RMSNorm, SwiGLU, grouped-query attention, RoPE), and its training.

    Attributes:
        corpus_bytes: text; the last document is for validation.
        vocab_size: tokens of the BPE.
        layers: transformer layers.
        hidden: hidden size.
        ffn: width of the SwiGLU MLP.
        heads: query heads.
        key_value_heads: key/value heads.
        sequence_length: clean tokens of a sample.
        micro_batches: samples of an iteration, one in a micro-batch.
        iterations: training iterations with CSBP.
        parity_iterations: how many of them the other schemes repeat.
        evaluate_every: iterations between evaluations.
        learning_rate: peak of the cosine schedule.
    """

    corpus_bytes: int
    vocab_size: int
    layers: int
    hidden: int
    ffn: int
    heads: int
    key_value_heads: int
    sequence_length: int
    micro_batches: int
    iterations: int
    parity_iterations: int
    evaluate_every: int
    learning_rate: float

    @property
    def head_dim(self) -> int:
        """D."""
        return self.hidden // self.heads

    def flags(self) -> list[str]:
        """Return Megatron's arguments, in fp32 so that differences are small enough to be told from errors."""
        return (
            f"--num-layers {self.layers} --hidden-size {self.hidden} --ffn-hidden-size {self.ffn} "
            f"--num-attention-heads {self.heads} --group-query-attention --num-query-groups {self.key_value_heads} "
            "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
            f"--position-embedding-type rope --seq-length {self.sequence_length} "
            f"--max-position-embeddings {self.sequence_length} --init-method-std 0.05 "
            "--tokenizer-type HuggingFaceTokenizer "
            f"--make-vocab-size-divisible-by 128 --diffusion-block-size {BLOCK_SIZE} --micro-batch-size 1 "
            f"--global-batch-size {self.micro_batches} --train-iters {self.iterations} --lr {self.learning_rate} "
            f"--min-lr {self.learning_rate / 10} --lr-decay-style cosine --lr-warmup-iters 5 "
            "--weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 --log-interval 1 --num-workers 0 --seed 7"
        ).split()


SIZES = {
    "full": Size(
        corpus_bytes=3_000_000,
        vocab_size=2048,
        layers=3,
        hidden=128,
        ffn=384,
        heads=4,
        key_value_heads=2,
        sequence_length=1024,
        micro_batches=4,
        iterations=90,
        parity_iterations=10,
        evaluate_every=40,
        learning_rate=4e-3,
    ),
    "quick": Size(
        corpus_bytes=300_000,
        vocab_size=512,
        layers=2,
        hidden=64,
        ffn=128,
        heads=4,
        key_value_heads=2,
        sequence_length=256,
        micro_batches=2,
        iterations=20,
        parity_iterations=4,
        evaluate_every=12,
        learning_rate=1e-2,
    ),
}


@dataclass(frozen=True, kw_only=True)
class TrafficCase:
    """A model and a length whose traffic has a closed form.

    Attributes:
        name: what it is.
        layers: transformer layers.
        key_value_heads: K.
        head_dim: D.
        itemsize: bytes of a key's element.
        sequence_length: L.
        block_size: M.
        num_ranks: P.
    """

    name: str
    layers: int
    key_value_heads: int
    head_dim: int
    itemsize: int
    sequence_length: int
    block_size: int
    num_ranks: int


PAPER_CASE = TrafficCase(
    name="Nemotron 14B, 256K tokens, bf16, 8 ranks",
    layers=40,
    key_value_heads=8,
    head_dim=128,
    itemsize=2,
    sequence_length=262_144,
    block_size=32,
    num_ranks=8,
)
