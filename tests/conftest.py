# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests, and the server that forks the ranks of those that run Megatron."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.megatron_run import Ranks

# Cores are often shared, so how long one example takes says nothing.
settings.register_profile("shared cores", deadline=None)
settings.register_profile("fuzz", deadline=None, print_blob=True)  # `make fuzz`, by --hypothesis-profile
settings.load_profile("shared cores")


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    server = Ranks(tmp_path_factory.mktemp("ranks"))
    yield server
    server.close()
