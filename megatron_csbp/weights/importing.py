# SPDX-License-Identifier: Apache-2.0
"""From a Hugging Face folder to a Megatron checkpoint."""

import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_csbp.weights.comparison import check_tensors
from megatron_csbp.weights.families import Family, family_of
from megatron_csbp.weights.layouts import LESS_ONE, rounded_entries
from megatron_csbp.weights.mask_token import find_mask_token
from megatron_csbp.weights.model_arguments import Arguments, arguments_from_config
from megatron_csbp.weights.model_flags import flags_of_arguments, yaml_text
from megatron_csbp.weights.model_shape import ModelShape, shape_from_arguments
from megatron_csbp.weights.rules import Piece, pieces, state_keys
from megatron_csbp.weights.safetensors_reader import SafetensorsFolder
from megatron_csbp.weights.side_files import HUGGING_FACE, copy_side_files, has_tokenizer, read_config, write_config
from megatron_csbp.weights.torch_dist_writer import write_checkpoint
from megatron_csbp.weights.whole_folder import whole_folder

MODEL_FILE = "model.yaml"
"""The model's flags, in the folder of an imported checkpoint."""

_IGNORED_ENDINGS = ("rotary_emb.inv_freq",)
_VOCABULARY = ("padded_vocab_size",)
# What only block-diffusion runs take.
_DIFFUSION = ("query_scale_beta",)
_LENGTH = 4096


@dataclass(frozen=True)
class Source:
    """A Hugging Face model that was found to fit its family's table.

    Attributes:
        folder: where it is.
        config: contents of its config.json, or the part of it that is the text model's.
        family: its family.
        arguments: Megatron's arguments for it.
        shape: its sizes.
        tensors: its weights.
        notes: what is left out, in words.
    """

    folder: Path
    config: dict[str, Any]
    family: Family
    arguments: Arguments
    shape: ModelShape
    tensors: SafetensorsFolder
    notes: tuple[str, ...]


def open_source(folder: Path, vocab_divisible_by: int, flag: str = "--from") -> Source:
    """Look at a model, without its weights' contents, and check that it fits.

    Args:
        folder: with config.json and safetensors files.
        vocab_divisible_by: Megatron's vocabulary is padded to a multiple of it.
        flag: names the folder in messages.

    Raises:
        ValueError: the family or a setting is not known, or tensors are missing, unexpected or of another shape.
    """
    config = read_config(folder, flag)
    family = family_of(config, f"{flag} {folder}")
    config = family.of_text_alone(config)
    arguments = arguments_from_config(family.config, config, vocab_divisible_by)
    tensors = SafetensorsFolder(folder)
    if family.head_is_its_own and family.head in tensors.entries:
        arguments["untie_embeddings_and_output_weights"] = True
    shape = shape_from_arguments(arguments, config["vocab_size"])
    found = {name: entry.shape for name, entry in tensors.entries.items() if not name.endswith(_IGNORED_ENDINGS)}
    notes = [f"left out {len(tensors.entries) - len(found)} rotary tables"] * (len(found) < len(tensors.entries))
    for beginning, what in family.left_out.items():
        names = [name for name in found if name.startswith(beginning)]
        notes += [f"left out {len(names)} tensors of {what} ({beginning}*)"] * bool(names)
        found = {name: found[name] for name in found if name not in names}
    if shape.tied and family.head in found:
        _check_repeated_head(family, tensors)
        del found[family.head]
        notes.append(f"left out {family.head}, which repeats the tied embedding")
    expected = {part.name: part.whole for piece in pieces(family.rules, family.body, shape) for part in piece.parts}
    check_tensors(expected, found, f"{flag} {folder}", f"the table of {family.model_type} and its config.json")
    return Source(folder, config, family, arguments, shape, tensors, tuple(notes))


def import_weights(
    source_folder: Path,
    save: Path,
    *,
    mask_token: str | None = None,
    dtype: torch.dtype | None = None,
    vocab_divisible_by: int = 8,
) -> list[str]:
    """Write a checkpoint that `--load ... --finetune` starts from, in any topology.

    Args:
        source_folder: the Hugging Face model.
        save: gets the checkpoint, `model.yaml` with the model's flags, and `huggingface/` with config and tokenizer.
        mask_token: id or token; see `find_mask_token`.
        dtype: of the written weights; that of the source by default.
        vocab_divisible_by: the vocabulary is padded to a multiple of it; tensor-parallel ranks share it evenly.

    Returns:
        What was done, in lines.

    Raises:
        ValueError: the source or the target cannot be used. Nothing is left behind then.
    """
    source = open_source(source_folder, vocab_divisible_by)
    mask_id = find_mask_token(mask_token, source.config, source_folder)
    parts = list(pieces(source.family.rules, source.family.body, source.shape))
    dtypes = _dtypes(parts, source.tensors, dtype)
    rounded: list[int] = []

    def make(piece: Piece) -> Tensor:
        read = [source.tensors.read(part.name, part.first_row, part.shape[0]) for part in piece.parts]
        if piece.rule.layout is LESS_ONE:
            rounded.append(rounded_entries(read[0], dtypes[piece.keys[0]]))
        return piece.rule.layout.pack(read, source.shape)

    with whole_folder(save, "--save") as folder:
        states = list(state_keys(source.family.states, source.shape))
        write_checkpoint(folder, parts, make, dtypes, states, _saved_arguments(source, save, mask_id))
        copy_side_files(source_folder, folder / HUGGING_FACE)
        if source.family.text_config is not None:
            write_config(folder / HUGGING_FACE, source.config)
        (folder / MODEL_FILE).write_text(_model_file(source, save, mask_id))
    return _report(source, save, dtypes, mask_id, sum(rounded))


def _check_repeated_head(family: Family, tensors: SafetensorsFolder) -> None:
    """A tied model's file may repeat the embedding as the output layer; anything else there would be lost."""
    embedding = family.body + "embed_tokens.weight"
    if embedding in tensors.entries and not torch.equal(tensors.read(family.head), tensors.read(embedding)):
        raise ValueError(
            f"{tensors.folder}: config.json ties embedding and output layer (tie_word_embeddings), but "
            f"{family.head} differs "
            f"from {embedding}. Set tie_word_embeddings to false there to keep both."
        )


def _dtypes(parts: list[Piece], tensors: SafetensorsFolder, asked: torch.dtype | None) -> dict[str, torch.dtype]:
    """Return the dtype of each of the checkpoint's tensors.

    Raises:
        ValueError: the tensors that one of Megatron's is made of have different dtypes.
    """
    dtypes: dict[str, torch.dtype] = {}
    for piece in parts:
        for key in piece.keys:
            for name in piece.names:
                dtype = asked or tensors.entries[name].dtype
                if dtypes.setdefault(key, dtype) != dtype:
                    raise ValueError(
                        f"{name} is of {dtype} and others of {key} are of {dtypes[key]}; choose one with --dtype, "
                        "for example "
                        "--dtype bf16."
                    )
    return dtypes


def _saved_arguments(source: Source, save: Path, mask_id: int | None) -> Namespace:
    """Return what the checkpoint says of the run that made it: the model, and that nothing else is there to load."""
    described = source.arguments | _tokenizer_arguments(source, save)
    return Namespace(
        **described,
        mask_token_id=mask_id,
        # The config.json of a diffusion model names it, that of an export among them.
        knows_mask_token=source.family.objective is not None
        or (mask_id is not None and source.config.get("mask_token_id") == mask_id),
        # No run has set it; commands that look at a checkpoint want one.
        seq_length=min(source.arguments["max_position_embeddings"], _LENGTH),
        no_save_optim=True,
        no_save_rng=True,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        ckpt_format="torch_dist",
        consumed_train_samples=0,
        skipped_train_samples=0,
        consumed_valid_samples=0,
        imported_model_type=source.family.model_type,
    )


def _tokenizer_arguments(source: Source, save: Path) -> Arguments:
    if not has_tokenizer(source.folder):
        return {}
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": os.path.abspath(save / HUGGING_FACE)}


def _model_file(source: Source, save: Path, mask_id: int | None) -> str:
    """Return the flags of the model, for --yaml-cfg."""
    apart = (*_VOCABULARY, *_DIFFUSION)
    vocabulary = _tokenizer_arguments(source, save) | {name: source.arguments[name] for name in _VOCABULARY}
    diffusion = {name: source.arguments.get(name) for name in _DIFFUSION} | {"mask_token_id": mask_id}
    if source.family.objective is not None:
        diffusion["diffusion_objective"] = source.family.objective
        diffusion["diffusion_block_size"] = source.config.get("block_size")
    sections: dict[str, Mapping[str, Any]] = {
        "model": flags_of_arguments({name: value for name, value in source.arguments.items() if name not in apart}),
        "tokenizer": flags_of_arguments(vocabulary),
        "block_diffusion": flags_of_arguments(diffusion),
    }
    header = (
        f"The flags of {source.folder.resolve().name} ({source.family.model_type}), for --yaml-cfg.\n"
        "Written by python -m megatron_csbp.weights import. An autoregressive run takes no block_diffusion section."
    )
    return yaml_text(header, sections)


def _report(
    source: Source, save: Path, dtypes: Mapping[str, torch.dtype], mask_id: int | None, rounded: int
) -> list[str]:
    names = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes.values()}))
    rows, padded = source.shape.dims["vocab"], source.shape.dims["padded_vocab"]
    mask = "no mask token is known; give --mask-token-id" if mask_id is None else f"mask token {mask_id}"
    padding = f", padded to {padded}: logits of 0 in Megatron's softmax" if padded != rows else ""
    rounding = (
        f"{rounded} entries of the norms of gated delta nets are rounded, since Megatron keeps these norms less one; "
        "--dtype fp32 rounds less"
    )
    used = {name for piece in pieces(source.family.rules, source.family.body, source.shape) for name in piece.names}
    return [
        f"imported {len(used)} tensors of {source.family.model_type} ({names}), "
        f"{source.shape.num_layers} "
        f"layers, into {save}",
        f"vocabulary {rows}{padding}; {mask}",
        *source.notes,
        *[rounding] * bool(rounded),
        f"train with: --yaml-cfg {save / MODEL_FILE} --load {save} --finetune",
    ]
