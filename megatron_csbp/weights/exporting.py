# SPDX-License-Identifier: Apache-2.0
"""From a Megatron checkpoint to a Hugging Face folder."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_csbp.weights.comparison import check_tensors
from megatron_csbp.weights.families import Family, family_of
from megatron_csbp.weights.layouts import Shape
from megatron_csbp.weights.model_arguments import arguments_from_config, config_from_arguments
from megatron_csbp.weights.model_shape import ModelShape, shape_from_arguments
from megatron_csbp.weights.released_memory import released_memory
from megatron_csbp.weights.rotary_arguments import OF_PICTURES, arguments_of_rope, rope_entries
from megatron_csbp.weights.rules import PartOfPiece, Piece, pieces
from megatron_csbp.weights.safetensors_reader import INDEX
from megatron_csbp.weights.safetensors_writer import SafetensorsWriter
from megatron_csbp.weights.side_files import copy_side_files, read_config, write_config
from megatron_csbp.weights.torch_dist_reader import TorchDistCheckpoint
from megatron_csbp.weights.trained_checkpoint import TrainedCheckpoint, open_checkpoint, original_model
from megatron_csbp.weights.whole_folder import whole_folder

_DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_NOT_WEIGHTS = ("rng_state", "rerun_state_machine")
# How a run trains, not what its weights are.
_FREE = (
    "attention_dropout",
    "hidden_dropout",
    "moe_router_load_balancing_type",
    "moe_token_dispatcher_type",
    "moe_aux_loss_coeff",
    "padded_vocab_size",
)


def export_weights(
    load: Path,
    to: Path,
    *,
    iteration: int | None = None,
    like: Path | None = None,
    dtype: torch.dtype | None = None,
) -> list[str]:
    """Write a folder that `transformers` loads.

    Args:
        load: the checkpoint folder.
        to: gets weights, config and tokenizer.
        iteration: which checkpoint; the latest by default.
        like: the Hugging Face model whose config and tokenizer go along; by default the one that the run started from.
        dtype: of the written weights; that of the checkpoint by default.

    Returns:
        What was done, in lines.

    Raises:
        ValueError: the checkpoint, the model that it should be like, or the target cannot be used. Nothing is left
            behind then.
    """
    checkpoint = open_checkpoint(load, iteration)
    like = _template(checkpoint, like)
    whole_config = read_config(like, "--like")
    family = family_of(whole_config, f"--like {like}")
    config = family.of_text_alone(whole_config)
    family = family_of(config, f"--like {like}")
    changed = changed_config(family, config, vars(checkpoint.arguments), f"--load {load}", f"--like {like}")
    shape = shape_from_arguments(vars(checkpoint.arguments), config["vocab_size"])
    weights = TorchDistCheckpoint(checkpoint.path)
    parts = list(located(pieces(family.rules, family.body, shape), weights))
    check_pieces(parts, weights, f"--load {load}", f"the table of {family.model_type} and the run's arguments")
    tensors = {
        part.name: (part.whole, dtype or weights.tensors[piece.keys[0]][1]) for piece in parts for part in piece.parts
    }
    widest = max((kind for _, kind in tensors.values()), key=lambda kind: kind.itemsize)
    with whole_folder(to, "--to") as folder:
        copy_side_files(like, folder)
        (folder / INDEX).unlink(missing_ok=True)
        _update_config(folder, config, changed, widest)
        with SafetensorsWriter(folder, tensors, _files_of(like)) as writer, released_memory() as done:
            for piece in parts:
                for part, tensor in unpacked(piece, weights, shape):
                    first_row = None if part.shape == part.whole else part.first_row
                    writer.write(part.name, tensor.to(tensors[part.name][1]), first_row)
                    done(tensor.nbytes)
                    del tensor
    alone = [f"the text model alone, as {family.model_type}"] if config != whole_config else []
    said = [f"config.json: {key} is {value!r}, as it was trained" for key, value in changed.items()]
    return [
        f"exported {len(tensors)} tensors of {family.model_type} ({_DTYPE_NAMES.get(widest, widest)}), iteration "
        f"{checkpoint.iteration}, into {to}",
        f"config and tokenizer from {like}",
        *alone,
        *said,
    ]


def changed_config(
    family: Family, config: Mapping[str, Any], arguments: Mapping[str, Any], load: str, like: str
) -> dict[str, Any]:
    """Compare a run's arguments with the config.json that goes along.

    Returns:
        Entries that training changed, and may: positions, and the mask token that a diffusion model has learnt.

    Raises:
        ValueError: the run trained another model.
    """
    heads = {"group_query_attention": True, "num_query_groups": arguments["num_attention_heads"]}
    saved = dict(arguments) if arguments.get("group_query_attention") else {**arguments, **heads}
    trained = config_from_arguments(family.config, saved, config["vocab_size"])
    expected = arguments_from_config(family.config, dict(config), 1)
    config = family.config.completed(dict(config))
    before, after = arguments_of_rope(config), arguments_of_rope(trained)
    free = {*_FREE, *before, *after} | ({"untie_embeddings_and_output_weights"} if family.head_is_its_own else set())
    movable = {setting.argument: setting.config for setting in family.config.settings if setting.may_change}
    # An argument that the checkpoint does not have, an older Megatron did not know.
    differing = {
        name: value for name, value in expected.items() if name not in free and saved.get(name, value) != value
    }
    wrong = [f"{name} is {saved[name]!r} and there {differing[name]!r}" for name in differing if name not in movable]
    rows, mask_id = config["vocab_size"], saved.get("mask_token_id")
    if saved["padded_vocab_size"] < rows:
        wrong.append(f"the vocabulary has {saved['padded_vocab_size']} rows and there {rows}")
    elif mask_id is not None and mask_id >= rows:
        wrong.append(f"the mask token {mask_id} would be lost with the rows beyond the {rows} there")
    if wrong:
        raise ValueError(f"{load} is not a model like {like}: {'; '.join(wrong)}.")
    changed = {movable[name]: saved[name] for name in differing}
    if saved.get("diffusion_block_size") is not None and config.get("mask_token_id") != mask_id:
        changed["mask_token_id"] = mask_id
    # Compared as Megatron sees them, since config.json can say the same in several ways.
    kept = {name: value for name, value in rope_entries(config).items() if name in OF_PICTURES}
    return changed | ({"rope_parameters": trained["rope_parameters"] | kept} if before != after else {})


def located(parts: Iterator[Piece], weights: TorchDistCheckpoint) -> Iterator[Piece]:
    """Keep of each piece the key under which the checkpoint has it; the first if it has none."""
    for piece in parts:
        key = next((key for key in piece.keys if key in weights.tensors), piece.keys[0])
        yield Piece(**{**vars(piece), "keys": (key,)})


def check_pieces(parts: list[Piece], weights: TorchDistCheckpoint, where: str, why: str) -> None:
    """Check that a checkpoint has exactly the tensors of the table.

    Raises:
        ValueError: it lacks some, has others, or has one of another shape.
    """
    every_key = {key for piece in parts for key in _all_keys(piece)}
    expected = {piece.keys[0]: piece.global_shape for piece in parts}
    found: dict[str, Shape] = {
        key: size
        for key, (size, _) in weights.tensors.items()
        if not key.startswith(_NOT_WEIGHTS) and (key in expected or key not in every_key)
    }
    check_tensors(expected, found, where, why)


def unpacked(
    piece: Piece, weights: TorchDistCheckpoint, shape: ModelShape
) -> Iterator[tuple[PartOfPiece, torch.Tensor]]:
    """Read a piece and yield the rows of Hugging Face's tensors in it."""
    packed = weights.read(piece.keys[0], piece.offset, piece.shape)
    packed = packed.reshape(piece.rule.layout.packed_shape(piece.part_shapes, shape))
    yield from zip(piece.parts, piece.rule.layout.unpack(packed, piece.part_shapes, shape), strict=True)


def _all_keys(piece: Piece) -> Iterator[str]:
    """Yield every key under which a piece may be kept."""
    names = (piece.rule.megatron, *piece.rule.also)
    own = next(name for name in names if piece.keys[0].endswith(name))
    yield from (piece.keys[0].removesuffix(own) + name for name in names)


def _template(checkpoint: TrainedCheckpoint, like: Path | None) -> Path:
    found = like or original_model(checkpoint)
    if found is None:
        raise ValueError(
            f"--load {checkpoint.folder} does not lead to the Hugging Face model that it was imported from; name "
            "its folder, or "
            "one of the same model, with --like: config and tokenizer come from there."
        )
    return found


def _files_of(like: Path) -> dict[str, str] | None:
    """Return which tensor is in which file of a model, so that an export is cut as the original was."""
    index = like / INDEX
    if not index.is_file():
        return None
    files: dict[str, str] = json.loads(index.read_text())["weight_map"]
    return files


def _update_config(folder: Path, config: Mapping[str, Any], changed: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Write config.json as it is to be, with what training changed; leave the file alone if it is so already.

    Args:
        folder: with the file of the model that the export is like.
        config: of the text model in it.
        changed: by training.
        dtype: of the weights.
    """
    is_whole = config != read_config(folder, "--to")
    config = dict(config)
    key = "dtype" if "dtype" in config or "torch_dtype" not in config else "torch_dtype"
    new = dict(changed)
    if key in config and config[key] != _DTYPE_NAMES.get(dtype, config[key]):
        new[key] = _DTYPE_NAMES[dtype]
    if "rope_parameters" in new and "rope_parameters" not in config:  # a file of transformers 4
        config.pop("rope_scaling", None)
        config.pop("rope_theta", None)
    if new or is_whole:
        write_config(folder, config | new)
