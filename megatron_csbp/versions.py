# SPDX-License-Identifier: Apache-2.0
"""What is installed: the packages that decide what a run computes, as text by name. Imports nothing of Megatron.

PyTorch is imported where it is asked, so that a machine without it can be told so.
"""

import functools
import hashlib
import importlib.metadata
import platform
from pathlib import Path

PACKAGES = (
    "megatron-csbp",
    "megatron-core",
    "numpy",
    "tokenizers",
    "transformers",
    "transformer-engine",
    "transformer-engine-torch",
    "triton",
    "flash-attn",
    "fla-core",
)
NOT_INSTALLED = "not installed"
_DIGEST_LETTERS = 12


def package_version(package: str) -> str:
    """Return the version of a distribution, or `NOT_INSTALLED`."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, of PyTorch and what it was built with, and of `PACKAGES`."""
    import torch

    found = {"Python": platform.python_version(), "PyTorch": torch.__version__, "CUDA": str(torch.version.cuda)}
    if torch.distributed.is_nccl_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    found["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    found |= {package: package_version(package) for package in PACKAGES}
    return found


@functools.cache
def source_digest() -> str:
    """Return a digest of this package's source: a copy that was edited keeps its version."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:_DIGEST_LETTERS]
