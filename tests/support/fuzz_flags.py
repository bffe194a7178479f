# SPDX-License-Identifier: Apache-2.0
"""Command lines for the fuzz test: this package's flags and those of Megatron's that most runs use, good and bad."""

from hypothesis import strategies as st

from tests.functional.model_flags import BLOCK_DIFFUSION, TIED, iterations

OURS = {
    "--bp-size": "1 2 3 4 0 -1",
    "--context-parallel-size": "1 2 4 3 0",
    "--context-scheme": "cp",
    "--diffusion-block-size": "1 2 8 16 32 64 7 0 -8",
    "--corrupted-views": "1 2 3 0",
    "--window-anchor": "position block",
    "--mask-token-id": "190 188 0 186 187 191 192 -1",
    "--init-mask-token": "mean mean-noise keep",
    "--diffusion-objective": "block-diffusion nemotron fast-dllm-v2",
    "--clean-attention": "token-causal block-causal",
    "--diffusion-loss-weight": "0.3 0 1 -1 nan",
    "--ar-loss-weight": "0 1 0.5 -1 inf",
    "--noise-schedule": "log-linear square sqrt log cosine",
    "--noise-eps": "0.001 0 0.5 1 2 nan",
    "--block-assignment": "dual-end contiguous",
    "--query-scale-beta": "0.1 0 -1",
    "--csbp-attention-backend": "auto torch flex hybrid transformer_engine",
    "--pack-documents": "",
    "--loss-on": "answers all",
    "--long-documents": "refuse cut",
    "--csbp-all-blocks": "",
    "--csbp-head-groups": "1 2 3 0",
    "--csbp-grad-reduce-dtype": "bf16 fp32",
    "--csbp-loss-chunk-rows": "0 1 16 -1",
    "--csbp-timing": "",
}
"""Values of each flag, by words; none is a flag without a value."""

MEGATRONS = {
    "--num-layers": "1 2 3 0",
    "--hidden-size": "64 32 66 0",
    "--ffn-hidden-size": "128 96 0",
    "--num-attention-heads": "4 2 1 3 0",
    "--num-query-groups": "2 1 4 3 0",
    "--kv-channels": "16 32 0",
    "--seq-length": "64 128 96 32 60 0",
    "--max-position-embeddings": "64 128 32",
    "--position-embedding-type": "rope none learned_absolute",
    "--rotary-base": "10000 500000 0",
    "--rotary-percent": "1.0 0.5 0",
    "--normalization": "RMSNorm LayerNorm",
    "--norm-epsilon": "1e-6 0",
    "--squared-relu": "",
    "--add-qkv-bias": "",
    "--qk-layernorm": "",
    "--untie-embeddings-and-output-weights": "",
    "--window-size": "8,0 64,0 8,8 0,0 x",
    "--attention-dropout": "0 0.1",
    "--hidden-dropout": "0 0.1",
    "--init-method-std": "0.02 0",
    "--make-vocab-size-divisible-by": "32 128 1 0",
    "--vocab-size": "187 191 250 1",
    "--micro-batch-size": "1 2 3 0",
    "--global-batch-size": "2 4 8 12 3 0",
    "--train-iters": "1 2 0",
    "--train-samples": "4",
    "--lr": "1e-3 0",
    "--min-lr": "0 1e-4 1",
    "--lr-decay-style": "cosine linear constant WSD",
    "--lr-decay-iters": "20 1 0",
    "--lr-warmup-iters": "0 3 50",
    "--lr-warmup-fraction": "0.01 1.5",
    "--weight-decay": "0 0.1",
    "--clip-grad": "1.0 0",
    "--optimizer": "adam sgd muon",
    "--bf16": "",
    "--fp16": "",
    "--fp8-format": "hybrid",
    "--tensor-model-parallel-size": "1 2 3 0",
    "--pipeline-model-parallel-size": "1 2 3 0",
    "--num-layers-per-virtual-pipeline-stage": "1 2",
    "--sequence-parallel": "",
    "--expert-model-parallel-size": "1 2",
    "--num-experts": "4 3",
    "--moe-router-topk": "1 2 5",
    "--moe-grouped-gemm": "",
    "--moe-token-dispatcher-type": "alltoall allgather",
    "--use-distributed-optimizer": "",
    "--overlap-grad-reduce": "",
    "--overlap-param-gather": "",
    "--recompute-granularity": "full selective",
    "--recompute-method": "uniform block",
    "--recompute-num-layers": "1 2 5",
    "--recompute-modules": "core_attn mlp layernorm",
    "--calculate-per-token-loss": "",
    "--seed": "1 0 -1",
    "--eval-interval": "1 0",
    "--eval-iters": "0 1",
    "--exit-interval": "1",
    "--log-interval": "1 0",
    "--split": "90,5,5 1,0,0 0,0,0 x",
    "--num-workers": "0 1 -1",
    "--dataloader-type": "single cyclic external",
    "--attention-backend": "auto flash unfused",
    "--transformer-impl": "local transformer_engine",
    "--sft": "",
    "--finetune": "",
    "--load": "/none",
    "--data-path": "/none",
    "--tokenizer-model": "/none",
    "--async-save": "",
    "--ckpt-format": "torch_dist torch",
    "--data-parallel-random-init": "",
    "--use-cpu-initialization": "",
    "--deterministic-mode": "",
}

_CHOICES = sorted(
    (flag, value) if value else (flag,)
    for flag, values in (OURS | MEGATRONS).items()
    for value in (values.split() or [""])
)


@st.composite
def command_lines(draw: st.DrawFn, most_changes: int = 5) -> list[str]:
    """Return a run of the small model with some flags added or changed; a later flag wins over an earlier one."""
    objective = draw(st.sampled_from([BLOCK_DIFFUSION, []]))
    changes = draw(st.lists(st.sampled_from(_CHOICES), max_size=most_changes, unique_by=lambda change: change[0]))
    return [*TIED, *objective, *iterations(1), *(word for change in changes for word in change)]


def added(flags: list[str]) -> list[str]:
    """Return what a command line says beyond the small model, for messages of failures."""
    return flags[len(TIED) :]
