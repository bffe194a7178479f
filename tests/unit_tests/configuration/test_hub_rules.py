# SPDX-License-Identifier: Apache-2.0
import http.server
import threading
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from megatron_csbp.configuration.hub_rules import check_hub_tokenizer, require_hub
from megatron_csbp.data.text_tokenizer import load_tokenizer

NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def answering() -> Iterator[str]:
    """A server that knows nothing."""
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_name_is_refused_at_once_where_its_server_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", NOBODY)
    args = Namespace(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="org/model-that-nobody-has")
    with pytest.raises(ValueError, match=r"--tokenizer-model org/model-that-nobody-has is no folder here.*Download"):
        check_hub_tokenizer(args)
    with pytest.raises(ValueError, match="--tokenizer org/model-that-nobody-has is no folder here"):
        load_tokenizer("org/model-that-nobody-has")
    check_hub_tokenizer(Namespace(tokenizer_type="NullTokenizer", tokenizer_model="org/model-that-nobody-has"))


def test_a_name_is_refused_offline(monkeypatch: pytest.MonkeyPatch, answering: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", answering)
    require_hub("--tokenizer", "org/model-that-nobody-has")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set"):
        require_hub("--tokenizer", "org/model-that-nobody-has")


def test_what_is_here_or_in_the_cache_needs_no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", NOBODY)
    require_hub("--tokenizer", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    require_hub("--tokenizer", "org/model")
