# SPDX-License-Identifier: Apache-2.0
"""What all ranks have to start with alike.

Left out is what the launcher gives each rank of its own (`rank` and `local_rank`, host names, devices), folders that a
node may have of its own by design, and variables of the environment but for the few that change how a step is
computed. Everything else of the arguments is compared.
"""

import dataclasses
import enum
import hashlib
import os
from argparse import Namespace
from typing import Any

import numpy as np
import torch

from megatron_csbp import arguments
from megatron_csbp.configuration.checkpoint_rules import Start
from megatron_csbp.configuration.flag_names import FlagNames
from megatron_csbp.data.identity import data_identity
from megatron_csbp.objectives.noise import SampleNoise
from megatron_csbp.versions import installed_versions, source_digest

_OF_A_RANK = ("rank", "local_rank", "data_cache_path", "non_persistent_local_ckpt_dir")
_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "NCCL_ALGO",
    "NCCL_PROTO",
)
_VARIABLE_PREFIXES = ("NVTE_",)
_PROBED_NUMBERS = 64
_DIGEST_LETTERS = 12


def start_facts(args: Namespace, start: Start, flags: FlagNames | None = None) -> dict[str, str]:
    """Return what has to be equal on all ranks before the first step.

    Args:
        args: validated arguments.
        start: what the run starts from.
        flags: how arguments are spelled.
    """
    facts = {f"the version of {name}": version for name, version in installed_versions().items()}
    facts["the source of megatron_csbp"] = source_digest()
    facts |= {name: os.environ[name] for name in sorted(os.environ) if _matters(name)}
    facts |= argument_facts(args, flags or FlagNames())
    facts |= data_identity(args)
    if start.checkpoint is not None:
        facts["the checkpoint"] = f"{start.checkpoint.flag}, {start.checkpoint.path.name}"
    else:
        facts["the checkpoint"] = "none"
    if arguments.is_block_diffusion(args):
        noise = SampleNoise(args.seed, split=0, sample_index=0)
        facts["the noise of the seed"] = _digest(noise.uniforms(0, _PROBED_NUMBERS))
        plans = arguments.static_plans(args, rank=0)
        facts["the attention plan"] = _digest([plans.plan(mask) for mask in arguments.masks(args)])
    return facts


def argument_facts(args: Namespace, flags: FlagNames) -> dict[str, str]:
    """Return every argument that is plain data, spelled as its flag; objects that Megatron adds are left out."""
    found: dict[str, str] = {}
    for name, value in vars(args).items():
        text = _plain(value)
        if name not in _OF_A_RANK and text is not None:
            flag = flags.flag(name)
            # Several arguments may be stored by one flag; a name can also be derived from others.
            found[flag if flag not in found else name] = text
    return found


def _matters(variable: str) -> bool:
    return variable in _VARIABLES or variable.startswith(_VARIABLE_PREFIXES)


def _plain(value: Any) -> str | None:
    """Return a value as it is shown; None if it is no plain data, and its text could hold an address."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, str):
        return value or "''"
    if value is None or isinstance(value, bool | int | float | torch.dtype | os.PathLike):
        return str(value)
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return None if None in items else f"[{' '.join(map(str, items))}]"
    if isinstance(value, dict):
        pairs = {str(key): _plain(item) for key, item in value.items()}
        return None if None in pairs.values() else str(pairs)
    return None


def _digest(value: Any) -> str:
    """Return a digest of arrays, plain values, and dataclasses and sequences of them."""
    digest = hashlib.sha256()
    _feed(digest, value)
    return f"digest {digest.hexdigest()[:_DIGEST_LETTERS]}"


def _feed(digest: "hashlib._Hash", value: Any) -> None:
    if isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        digest.update(type(value).__name__.encode())
        for field in dataclasses.fields(value):
            _feed(digest, getattr(value, field.name))
    elif isinstance(value, list | tuple):
        digest.update(f"[{len(value)}".encode())
        for item in value:
            _feed(digest, item)
    elif isinstance(value, enum.Enum):
        digest.update(value.name.encode())
    elif value is None or isinstance(value, bool | int | float | str):
        digest.update(f"{value!r},".encode())
    else:
        raise TypeError(f"a plan holds a {type(value).__name__}, which has no digest")
