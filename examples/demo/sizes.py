# SPDX-License-Identifier: Apache-2.0
"""How large the demo is: the model, its two trainings, and the case of the paper that its bytes are put beside."""

from dataclasses import dataclass

NUM_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training.

    Attributes:
        iterations: how many.
        samples: of an iteration.
        micro_batch: samples that a data-parallel rank computes at once.
        evaluate_every: iterations between evaluations.
        learning_rate: peak of the cosine schedule, which ends at a tenth.
    """

    iterations: int
    samples: int
    micro_batch: int
    evaluate_every: int
    learning_rate: float

    def flags(self) -> list[str]:
        """Return Megatron's arguments."""
        return (
            f"--micro-batch-size {self.micro_batch} --global-batch-size {self.samples} "
            f"--train-iters {self.iterations} --lr {self.learning_rate} --min-lr {self.learning_rate / 10} "
            f"--lr-decay-style cosine --lr-warmup-iters 5 --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 "
            f"--eval-interval {self.evaluate_every} "
            "--log-interval 1 --num-workers 0 --seed 7"
        ).split()


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model shaped like Nemotron-Labs-Diffusion (RMSNorm, SwiGLU, grouped-query attention, RoPE), and its trainings.

    Attributes:
        corpus_bytes: text to train on.
        held_out_bytes: at most so much text for validation.
        vocab_size: tokens of the BPE.
        layers: transformer layers.
        hidden: hidden size.
        ffn: width of the SwiGLU MLP.
        heads: query heads.
        key_value_heads: key/value heads.
        sequence_length: clean tokens of a sample.
        block_size: tokens of a diffusion block.
        autoregressive: the first training.
        diffusion: the conversion, and the training from scratch beside it.
        parity_iterations: how many iterations of the conversion the other schemes repeat.
        new_tokens: length of the continuation.
        largest_share: the converted model's validation NELBO must be below this share of the entropy of single tokens.
    """

    corpus_bytes: int
    held_out_bytes: int
    vocab_size: int
    layers: int
    hidden: int
    ffn: int
    heads: int
    key_value_heads: int
    sequence_length: int
    block_size: int
    autoregressive: Training
    diffusion: Training
    parity_iterations: int
    new_tokens: int
    largest_share: float

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
            "--tokenizer-type HuggingFaceTokenizer --make-vocab-size-divisible-by 128"
        ).split()


SIZES = {
    "full": Size(
        corpus_bytes=2_500_000,
        held_out_bytes=66_000,
        vocab_size=512,
        layers=3,
        hidden=128,
        ffn=384,
        heads=4,
        key_value_heads=2,
        sequence_length=256,
        block_size=8,
        autoregressive=Training(iterations=150, samples=8, micro_batch=4, evaluate_every=75, learning_rate=8e-3),
        diffusion=Training(iterations=48, samples=8, micro_batch=8, evaluate_every=16, learning_rate=4e-3),
        parity_iterations=8,
        new_tokens=96,
        largest_share=0.95,
    ),
    "quick": Size(
        corpus_bytes=300_000,
        held_out_bytes=17_000,
        vocab_size=384,
        layers=2,
        hidden=64,
        ffn=128,
        heads=4,
        key_value_heads=2,
        sequence_length=128,
        block_size=8,
        autoregressive=Training(iterations=40, samples=8, micro_batch=4, evaluate_every=40, learning_rate=1e-2),
        diffusion=Training(iterations=12, samples=8, micro_batch=8, evaluate_every=6, learning_rate=1e-2),
        parity_iterations=4,
        new_tokens=16,
        largest_share=1.1,
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
