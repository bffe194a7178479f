# SPDX-License-Identifier: Apache-2.0
"""How a job is spread over ranks, what it recomputes, and how it stores numbers. Pure: no torch, no Megatron."""

from dataclasses import dataclass

from megatron_csbp.transformer.geometry.scheme import BlockAssignment, Scheme


@dataclass(frozen=True, kw_only=True)
class Topology:
    """How many ranks share what, in Megatron's order tp-cp-ep-dp-pp.

    Attributes:
        gpus: ranks of the job.
        tensor: tensor-parallel ranks.
        context: P, ranks of the context group, whatever the scheme.
        pipeline: pipeline stages.
        virtual: model chunks on a pipeline rank.
        expert: expert-parallel ranks.
        expert_tensor: tensor-parallel ranks of an expert.
        scheme: how a sample is spread over the context group.
        assignment: which chunks a rank owns.
        sequence_parallel: whether tensor-parallel ranks share the rows outside attention and MLP.
    """

    gpus: int
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    expert_tensor: int = 1
    scheme: Scheme = Scheme.SINGLE
    assignment: BlockAssignment = BlockAssignment.DUAL_END
    sequence_parallel: bool = False

    @property
    def data(self) -> int:
        """Samples that are trained on at a time: data-parallel ranks."""
        return self.gpus // (self.tensor * self.context * self.pipeline)

    @property
    def gradient_group(self) -> int:
        """Ranks that sum the gradients of one parameter: data- times context-parallel."""
        return self.data * self.context

    @property
    def expert_gradient_group(self) -> int:
        """Ranks that sum the gradients of one expert."""
        return max(1, self.gpus // (self.pipeline * self.expert * self.expert_tensor))

    @property
    def name(self) -> str:
        """For tables."""
        sizes = (("DP", self.data), ("PP", self.pipeline), ("TP", self.tensor), ("EP", self.expert))
        parts = [f"{what} {size}" for what, size in sizes if size > 1 or what == "DP"]
        if self.virtual > 1:
            parts.append(f"VPP {self.virtual}")
        return " x ".join([*parts, *([f"{self.scheme} {self.context}"] if self.context > 1 else [])])

    def flags(self) -> str:
        """Return the flags that ask for it."""
        words = [
            f"--tensor-model-parallel-size {self.tensor}{' --sequence-parallel' * self.sequence_parallel}",
            f"--pipeline-model-parallel-size {self.pipeline}",
            *([f"--expert-model-parallel-size {self.expert}"] if self.expert > 1 else []),
        ]
        by_scheme = {
            Scheme.SINGLE: "--context-parallel-size 1 --bp-size 1",
            Scheme.CONTEXT_PARALLEL: f"--context-parallel-size {self.context} --bp-size 1 --context-scheme cp",
            Scheme.BLOCK_PARALLEL: f"--context-parallel-size 1 --bp-size {self.context}",
            Scheme.CONTEXT_SHARDED_BLOCK_PARALLEL: f"--context-parallel-size {self.context} --bp-size {self.context}",
        }
        return " ".join([*words, by_scheme[self.scheme]])


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """What runs again in the backward pass.

    Attributes:
        whole_layers: layers of a model chunk that keep only their input; None for all.
        per_checkpoint: layers that share a kept input.
        modules: with no whole layers, the modules that are recomputed (`core_attn`, `mlp`, `layernorm`, `moe`).
        distributes: whether tensor-parallel ranks share a kept input.
    """

    whole_layers: int | None = 0
    per_checkpoint: int = 1
    modules: frozenset[str] = frozenset()
    distributes: bool = False

    def takes_layer(self, index: int) -> bool:
        """Return whether the layer of this index in its chunk is recomputed as a whole."""
        return self.whole_layers is None or index < self.whole_layers

    @property
    def attention(self) -> bool:
        """Whether the attention runs again, in any layer."""
        return self.whole_layers != 0 or "core_attn" in self.modules

    @property
    def name(self) -> str:
        """For tables."""
        if self.whole_layers is None:
            return "full recomputation"
        if self.whole_layers:
            return f"{self.whole_layers} layers of a chunk recomputed"
        return f"recomputes {', '.join(sorted(self.modules))}" if self.modules else "no recomputation"


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes of the elements of what a rank holds.

    Attributes:
        weights: of a weight, and of activations.
        gradients: of a gradient in its buffer.
        optimizer: of the optimizer's state for each parameter: a copy in fp32 if weights are not, and two moments.
        key_gradients: of key and value gradients on a link.
    """

    weights: int = 2
    gradients: int = 4
    optimizer: int = 12
    key_gradients: int = 2


@dataclass(frozen=True, kw_only=True)
class Layers:
    """How the layers are implemented.

    Attributes:
        fused_norms: norms are one kernel that keeps its input (Transformer Engine, CUDA); else PyTorch's on a CPU,
            which computes in fp32 and keeps two fp32 tensors.
        fused_rope: rotary embedding is one kernel; else a layer keeps sines and cosines in the dtype of its rows.
    """

    fused_norms: bool = True
    fused_rope: bool = True
