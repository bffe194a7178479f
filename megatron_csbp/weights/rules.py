# SPDX-License-Identifier: Apache-2.0
"""What a table of tensors is made of, and the pieces of a checkpoint that it describes for a model of given sizes."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from megatron_csbp.weights.layouts import SAME, Layout, Shape
from megatron_csbp.weights.model_shape import ModelShape


class Scope(Enum):
    """How many of a tensor there are."""

    MODEL = "one"
    LAYER = "one in each layer"
    EXPERT = "one for each expert of each layer"


@dataclass(frozen=True)
class Part:
    """A tensor of Hugging Face's, or some of its rows.

    Attributes:
        name: with fields `{body}`, `{layer}`, `{expert}`.
        dims: names of its dims in `ModelShape.dims`.
        whole: of some rows, the dims of the whole tensor.
        behind: of some rows, the dims whose sizes together are the rows in front of them.
    """

    name: str
    dims: str
    whole: str | None = None
    behind: str = ""


@dataclass(frozen=True)
class TensorRule:
    """A tensor of Megatron's, and what it is made of.

    Attributes:
        megatron: its key; in a layer, without `decoder.layers.`.
        parts: Hugging Face's tensors.
        layout: how the parts lie in it.
        scope: how many there are.
        kind: only in layers of this kind; None for all.
        also: further keys of the same tensor, under which other layer specs look for it.
        untied_only: the model has it only if embedding and output layer are not tied.
        in_transformers: name, in a layer, of the tensor in which `transformers` keeps the parts of all experts.
    """

    megatron: str
    parts: tuple[Part, ...]
    layout: Layout = SAME
    scope: Scope = Scope.LAYER
    kind: str | None = None
    also: tuple[str, ...] = ()
    untied_only: bool = False
    in_transformers: str | None = None


@dataclass(frozen=True)
class StateRule:
    """A module for which Megatron's loader asks an extra state (of FP8; empty here).

    Attributes:
        module: its name; in a layer, without `decoder.layers.`.
        scope: how many there are.
        kind: only in layers of this kind; None for all.
    """

    module: str
    scope: Scope = Scope.LAYER
    kind: str | None = None


@dataclass(frozen=True)
class PartOfPiece:
    """Rows of one of Hugging Face's tensors; mostly all of them.

    Attributes:
        name: of the tensor.
        shape: of the rows.
        whole: of the tensor.
        first_row: where the rows begin in it.
    """

    name: str
    shape: Shape
    whole: Shape
    first_row: int = 0


@dataclass(frozen=True)
class Piece:
    """The part of one of a checkpoint's tensors that is read or written at a time.

    Attributes:
        keys: names of the tensor in the checkpoint; the second and later ones hold the same.
        global_shape: of the whole tensor.
        offset: of this piece in it.
        shape: of this piece, dims of layer and expert included.
        parts: what of Hugging Face's tensors is in this piece.
        rule: where it comes from.
        layer: the layer; None outside of layers.
        expert: the expert; None outside of experts.
    """

    keys: tuple[str, ...]
    global_shape: Shape
    offset: Shape
    shape: Shape
    parts: tuple[PartOfPiece, ...]
    rule: TensorRule
    layer: int | None
    expert: int | None

    @property
    def names(self) -> tuple[str, ...]:
        """Hugging Face's tensors in this piece."""
        return tuple(part.name for part in self.parts)

    @property
    def part_shapes(self) -> tuple[Shape, ...]:
        """Shapes of the parts."""
        return tuple(part.shape for part in self.parts)


def pieces(rules: tuple[TensorRule, ...], body: str, model: ModelShape) -> Iterator[Piece]:
    """Yield the pieces of all tensors: model-wide ones, then layer by layer.

    Args:
        rules: the family's table.
        body: prefix of Hugging Face's decoder, for example `model.`.
        model: sizes.
    """
    for rule in rules:
        if rule.scope is Scope.MODEL and not (rule.untied_only and model.tied):
            yield _piece(rule, body, model, None, None)
    for layer in range(model.num_layers):
        for rule in rules:
            if rule.scope is Scope.MODEL or rule.kind not in (None, *model.layer_kinds[layer]):
                continue
            experts = range(model.dims["experts"]) if rule.scope is Scope.EXPERT else (None,)
            for expert in experts:
                yield _piece(rule, body, model, layer, expert)


def _piece(rule: TensorRule, body: str, model: ModelShape, layer: int | None, expert: int | None) -> Piece:
    counts, place = _leading_dims(model, layer, expert)
    parts = tuple(
        PartOfPiece(
            name=part.name.format(body=body, layer=layer, expert=expert),
            shape=model.shape(part.dims),
            whole=model.shape(part.whole or part.dims),
            first_row=sum(model.shape(part.behind)),
        )
        for part in rule.parts
    )
    packed = rule.layout.packed_shape([part.shape for part in parts], model)
    prefix = _prefix(model, layer)
    return Piece(
        keys=tuple(prefix + key for key in (rule.megatron, *rule.also)),
        global_shape=(*counts, *packed),
        offset=(*place, *(0 for _ in packed)),
        shape=(*(1 for _ in counts), *packed),
        parts=parts,
        rule=rule,
        layer=layer,
        expert=expert,
    )


def state_keys(rules: tuple[StateRule, ...], model: ModelShape) -> Iterator[str]:
    """Yield the keys of all extra states, as Megatron numbers its sharded objects."""
    for rule in rules:
        if rule.scope is Scope.MODEL:
            yield f"{rule.module}._extra_state/shard_0_1"
            continue
        for layer in range(model.num_layers):
            if rule.kind not in (None, *model.layer_kinds[layer]):
                continue
            for expert in range(model.dims["experts"]) if rule.scope is Scope.EXPERT else (None,):
                counts, place = _leading_dims(model, layer, expert)
                number = f"{'.'.join(map(str, place or (0,)))}_{'.'.join(map(str, counts or (1,)))}"
                yield f"{_prefix(model, layer)}{rule.module}._extra_state/shard_{number}"


def _leading_dims(model: ModelShape, layer: int | None, expert: int | None) -> tuple[Shape, Shape]:
    """Return sizes of the dims that Megatron puts in front for layers and experts, and the place in them."""
    counts: list[int] = []
    place: list[int] = []
    if layer is not None and model.uniform:
        counts.append(model.num_layers)
        place.append(layer)
    if expert is not None:
        counts.append(model.dims["experts"])
        place.append(expert)
    return tuple(counts), tuple(place)


def _prefix(model: ModelShape, layer: int | None) -> str:
    if layer is None:
        return ""
    return "decoder.layers." if model.uniform else f"decoder.layers.{layer}."
