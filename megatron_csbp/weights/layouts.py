# SPDX-License-Identifier: Apache-2.0
"""How Hugging Face's tensors lie in one of Megatron's: packing and its inverse, bit for bit.

A layout is a pair of functions on tensors and one on shapes. A new model family that keeps its tensors in another way
adds a layout here (see `Layout`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_csbp.weights.model_shape import ModelShape

type Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """A way to keep several tensors in one.

    Attributes:
        pack: from the parts, in the order of the rule, to Megatron's tensor.
        unpack: the inverse; takes the parts' shapes as well.
        packed_shape: from the parts' shapes to that of Megatron's tensor.
    """

    pack: Callable[[Sequence[Tensor], ModelShape], Tensor]
    unpack: Callable[[Tensor, Sequence[Shape], ModelShape], list[Tensor]]
    packed_shape: Callable[[Sequence[Shape], ModelShape], Shape]


def _stacked_shape(shapes: Sequence[Shape], model: ModelShape) -> Shape:
    """Return the shape of tensors put below each other."""
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _pack_one(parts: Sequence[Tensor], model: ModelShape) -> Tensor:
    (tensor,) = parts
    return tensor


def _unpack_one(tensor: Tensor, shapes: Sequence[Shape], model: ModelShape) -> list[Tensor]:
    return [tensor]


def _stack(parts: Sequence[Tensor], model: ModelShape) -> Tensor:
    return torch.cat(list(parts))


def _unstack(tensor: Tensor, shapes: Sequence[Shape], model: ModelShape) -> list[Tensor]:
    return list(torch.split(tensor, [shape[0] for shape in shapes]))


def _groups(model: ModelShape) -> int:
    """Return the number of key/value heads."""
    return model.dims["keys"] // model.dims["head"]


def _interleave(parts: Sequence[Tensor], model: ModelShape) -> Tensor:
    """Put together, for each key/value head, its share of every part: [its query heads, key, value], ..."""
    by_group = [part.view(_groups(model), -1, *part.shape[1:]) for part in parts]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def _deinterleave(tensor: Tensor, shapes: Sequence[Shape], model: ModelShape) -> list[Tensor]:
    groups = _groups(model)
    by_group = tensor.view(groups, -1, *tensor.shape[1:])
    rows = [shape[0] // groups for shape in shapes]
    return [part.flatten(0, 1) for part in torch.split(by_group, rows, dim=1)]


def _interleave_gated(parts: Sequence[Tensor], model: ModelShape) -> Tensor:
    """Put together, for each key/value head, its query heads, their gates, its key, its value."""
    query, *others = parts
    heads = (_groups(model), -1, 2, model.dims["head"])
    by_kind = query.view(*heads, *query.shape[1:]).transpose(1, 2).reshape(query.shape)
    return _interleave([by_kind, *others], model)


def _deinterleave_gated(tensor: Tensor, shapes: Sequence[Shape], model: ModelShape) -> list[Tensor]:
    by_kind, *others = _deinterleave(tensor, shapes, model)
    heads = (_groups(model), 2, -1, model.dims["head"])
    query = by_kind.reshape(*heads, *by_kind.shape[1:]).transpose(1, 2).reshape(by_kind.shape)
    return [query, *others]


def _less_one(parts: Sequence[Tensor], model: ModelShape) -> Tensor:
    (tensor,) = parts
    return tensor.double() - 1


def _plus_one(tensor: Tensor, shapes: Sequence[Shape], model: ModelShape) -> list[Tensor]:
    return [tensor.double() + 1]


def _pad_rows(parts: Sequence[Tensor], model: ModelShape) -> Tensor:
    (tensor,) = parts
    missing = model.dims["padded_vocab"] - len(tensor)
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def _crop_rows(tensor: Tensor, shapes: Sequence[Shape], model: ModelShape) -> list[Tensor]:
    return [tensor[: shapes[0][0]]]


def _padded_shape(shapes: Sequence[Shape], model: ModelShape) -> Shape:
    return (model.dims["padded_vocab"], *shapes[0][1:])


SAME = Layout(_pack_one, _unpack_one, _stacked_shape)
"""One tensor, as it is."""

STACKED = Layout(_stack, _unstack, _stacked_shape)
"""Parts below each other: gate and up projection, on any number of tensor-parallel ranks."""

GROUPED_QKV = Layout(_interleave, _deinterleave, _stacked_shape)
"""For each key/value head: its query heads, its key, its value. A part may have any number of rows for each."""

GATED_QKV = Layout(_interleave_gated, _deinterleave_gated, _stacked_shape)
"""The same with output gates, of which Hugging Face has one behind each query head: query heads, gates, key, value."""

LESS_ONE = Layout(_less_one, _plus_one, _stacked_shape)
"""The weight of a norm that is zero-centred in Megatron only, in fp64. Where it is below 0.5, the dtype that it is
written in may round it; see `rounded_entries`."""

VOCABULARY = Layout(_pad_rows, _crop_rows, _padded_shape)
"""Rows of a vocabulary; Megatron's has rows of zeros after Hugging Face's last one."""


def rounded_entries(tensor: Tensor, dtype: torch.dtype) -> int:
    """Return how many entries of a norm's weight `LESS_ONE` does not give back bit for bit.

    Args:
        tensor: Hugging Face's.
        dtype: that Megatron's is written in.
    """
    again = (tensor.double() - 1).to(dtype).double() + 1
    return int((again.to(tensor.dtype) != tensor).sum())
