# SPDX-License-Identifier: Apache-2.0
"""The sizes of a decoder, and how many parameters its layers have on one rank. Pure: no torch, no Megatron."""

from dataclasses import dataclass, replace
from enum import StrEnum

from megatron_csbp.transformer.delta_net.costs import layer_parameters as delta_net_parameters
from megatron_csbp.transformer.delta_net.traffic import DeltaNetSizes


class LayerKind(StrEnum):
    """What mixes the rows of a layer."""

    FULL = "full attention"
    WINDOW = "window attention"
    DELTA_NET = "gated delta net"


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    Attributes:
        number: from 1.
        kind: what mixes rows.
        window: keys that a row sees at most; None for all.
        has_experts: its MLP is a mixture of experts.
    """

    number: int
    kind: LayerKind = LayerKind.FULL
    window: int | None = None
    has_experts: bool = False

    @property
    def attends(self) -> bool:
        """Whether it has queries, keys and values."""
        return self.kind is not LayerKind.DELTA_NET


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The mixtures of experts of a network.

    Attributes:
        number: of routed experts.
        chosen: experts that a row goes to.
        ffn: width of one.
        shared_ffn: width of the expert that all rows go to; 0 for none.
        shared_gate: whether that expert's output is weighted.
    """

    number: int
    chosen: int
    ffn: int
    shared_ffn: int = 0
    shared_gate: bool = False


@dataclass(frozen=True)
class Parameters:
    """Parameters on one rank: those that every rank of its data-parallel group has, and its own experts'.

    Attributes:
        dense: all but the experts'.
        experts: of routed experts.
    """

    dense: int = 0
    experts: int = 0

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(self.dense + other.dense, self.experts + other.experts)

    @property
    def total(self) -> int:
        """Both."""
        return self.dense + self.experts


@dataclass(frozen=True, kw_only=True)
class Network:
    """The sizes of a decoder.

    Attributes:
        layers: its layers, in order.
        hidden: H.
        ffn: width of a dense MLP.
        query_heads: N.
        key_heads: K.
        head_dim: D.
        vocab: rows of the embedding, padded.
        gated: whether an MLP has a gate (SwiGLU), a third matrix.
        tied: whether embedding and output layer are one tensor.
        norm_tensors: vectors of a norm: 1 for RMSNorm, 2 for LayerNorm.
        qk_norm: whether queries and keys are normalised.
        qkv_bias: whether the first projection has a bias.
        linear_bias: whether all linear layers have.
        output_gate: whether attention gates its output, with a projection as wide as the queries'.
        learned_positions: rows of a learned position embedding; 0 for none.
        experts: sizes of its mixtures of experts, if it has any.
        delta_net: sizes of its gated delta nets, all heads, if it has any.
    """

    layers: tuple[Layer, ...]
    hidden: int
    ffn: int
    query_heads: int
    key_heads: int
    head_dim: int
    vocab: int
    gated: bool = True
    tied: bool = False
    norm_tensors: int = 1
    qk_norm: bool = False
    qkv_bias: bool = False
    linear_bias: bool = False
    output_gate: bool = False
    learned_positions: int = 0
    experts: Experts | None = None
    delta_net: DeltaNetSizes | None = None

    def mlp_matrices(self, width: int) -> int:
        """Return the elements of an MLP's matrices."""
        return (3 if self.gated else 2) * self.hidden * width

    def local_key_heads(self, tensor_size: int) -> int:
        """Return K on a tensor-parallel rank: fewer heads than ranks are repeated."""
        return max(1, self.key_heads // tensor_size)

    def mixer_parameters(self, layer: Layer, tensor_size: int = 1) -> int:
        """Return the parameters of a layer's attention or delta net with the norm before it, on one rank."""
        norm = self.norm_tensors * self.hidden
        if layer.kind is LayerKind.DELTA_NET:
            return norm + delta_net_parameters(self.delta_net_on_rank(tensor_size), self.hidden)
        queries = self.query_heads * self.head_dim // tensor_size
        keys = self.local_key_heads(tensor_size) * self.head_dim
        features = queries * (2 if self.output_gate else 1) + 2 * keys
        biases = features * (self.qkv_bias or self.linear_bias) + self.hidden * self.linear_bias
        head_norms = 2 * self.norm_tensors * self.head_dim * self.qk_norm
        return norm + self.hidden * (features + queries) + biases + head_norms

    def delta_net_on_rank(self, tensor_size: int, itemsize: int = 2) -> DeltaNetSizes:
        """Return the sizes of a delta net on one tensor-parallel rank.

        Args:
            tensor_size: tensor-parallel ranks.
            itemsize: bytes of a number of a row.
        """
        whole = self.delta_net
        assert whole is not None, "a network with gated delta nets has their sizes"
        return replace(
            whole,
            key_heads=whole.key_heads // tensor_size,
            value_heads=whole.value_heads // tensor_size,
            row_itemsize=itemsize,
        )

    def mlp_parameters(
        self, layer: Layer, tensor_size: int = 1, expert_size: int = 1, expert_tensor: int = 1
    ) -> Parameters:
        """Return the parameters of a layer's MLP with the norm before it, on one rank.

        Args:
            layer: the layer.
            tensor_size: tensor-parallel ranks.
            expert_size: expert-parallel ranks.
            expert_tensor: tensor-parallel ranks of an expert.
        """
        norm = self.norm_tensors * self.hidden
        wide = 2 if self.gated else 1
        if not layer.has_experts:
            biases = (wide * self.ffn // tensor_size + self.hidden) * self.linear_bias
            return Parameters(norm + self.mlp_matrices(self.ffn) // tensor_size + biases)
        experts = self.experts
        assert experts is not None, "a network with experts has their sizes"
        shared = self.mlp_matrices(experts.shared_ffn) // tensor_size + self.hidden * experts.shared_gate
        biases = (wide * experts.ffn // expert_tensor + self.hidden) * self.linear_bias
        routed = experts.number // expert_size * (self.mlp_matrices(experts.ffn) // expert_tensor + biases)
        return Parameters(norm + self.hidden * experts.number + shared, routed)

    def layer_parameters(
        self, layer: Layer, tensor_size: int = 1, expert_size: int = 1, expert_tensor: int = 1
    ) -> Parameters:
        """Return the parameters of a layer on one rank; see `mlp_parameters`."""
        mixer = Parameters(self.mixer_parameters(layer, tensor_size))
        return mixer + self.mlp_parameters(layer, tensor_size, expert_size, expert_tensor)

    def embedding_parameters(self, tensor_size: int = 1) -> int:
        """Return the parameters of the embedding on one rank of the first stage."""
        return self.vocab // tensor_size * self.hidden + self.learned_positions * self.hidden

    def head_parameters(self, tensor_size: int = 1) -> int:
        """Return the parameters of the last norm and the output layer, were it a tensor of its own."""
        return self.norm_tensors * self.hidden + self.vocab // tensor_size * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole network, a tied tensor once."""
        head = self.norm_tensors * self.hidden if self.tied else self.head_parameters()
        return self.embedding_parameters() + head + sum(self.layer_parameters(layer).total for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """Parameters that a row meets: of the routed experts, the chosen ones."""
        if self.experts is None:
            return self.parameters
        idle = self.experts.number - self.experts.chosen
        per_layer = idle * self.mlp_matrices(self.experts.ffn)
        return self.parameters - per_layer * sum(layer.has_experts for layer in self.layers)
