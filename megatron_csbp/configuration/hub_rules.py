# SPDX-License-Identifier: Apache-2.0
"""A tokenizer that is no folder is in the cache or can be fetched; without a network transformers tries for long."""

import re
import urllib.error
import urllib.request
from argparse import Namespace
from pathlib import Path

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PATIENCE_SECONDS = 5.0
_FILES = ("tokenizer_config.json", "tokenizer.json", "config.json")


def check_hub_tokenizer(args: Namespace) -> None:
    """A Hugging Face tokenizer is here, or can be fetched.

    Raises:
        ValueError: it is neither.
    """
    model = args.tokenizer_model
    if args.tokenizer_type == "HuggingFaceTokenizer" and model is not None:
        require_hub("--tokenizer-model", model)


def require_hub(flag: str, name: str) -> None:
    """Check that a name which is no path here is in the local cache, or that its server answers.

    Args:
        flag: that gives the name.
        name: of a repository, or a path.

    Raises:
        ValueError: the name is in no cache and the server cannot be reached.
    """
    if Path(name).exists() or not HUB_NAME.fullmatch(name):
        return
    import huggingface_hub
    from huggingface_hub import constants

    if any(isinstance(huggingface_hub.try_to_load_from_cache(name, file), str) for file in _FILES):
        return
    why = _why_unreachable(constants.ENDPOINT, constants.HF_HUB_OFFLINE)
    if why is not None:
        raise ValueError(
            f"{flag} {name} is no folder here and is not in the cache of huggingface_hub, and it cannot be downloaded "
            f"({why}). Download it on a machine with a network and give its folder: {flag} FOLDER."
        )


def _why_unreachable(endpoint: str, is_offline: bool) -> str | None:
    """Return why a server does not answer; None if it does, whatever it says."""
    if is_offline:
        return "HF_HUB_OFFLINE is set"
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_PATIENCE_SECONDS).close()
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        return f"{endpoint}: {getattr(error, 'reason', error)}"
    return None
