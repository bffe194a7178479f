# SPDX-License-Identifier: Apache-2.0
"""The server that forks the ranks of every run."""

from collections.abc import Iterator

import pytest

from tests.support.megatron_run import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    server = Ranks(tmp_path_factory.mktemp("ranks"))
    yield server
    server.close()
