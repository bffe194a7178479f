# SPDX-License-Identifier: Apache-2.0
"""The rank server with a stand-in for Transformer Engine under Megatron: see `transformer_engine_stub`."""

import sys
from pathlib import Path

from megatron_csbp.configuration import runtime_arguments
from megatron_csbp.cpu_runtime import installation
from tests.support import rank_server


def main() -> None:
    """Serve, with Transformer Engine's layers left in place on the CPU."""
    sys.path.insert(0, str(Path(__file__).parent / "transformer_engine_stub"))
    kept = tuple(package for package in installation.GPU_PACKAGES if package != "transformer_engine")
    installation.GPU_PACKAGES = kept
    runtime_arguments._CPU_VALUES = tuple(v for v in runtime_arguments._CPU_VALUES if v[0] != "transformer_impl")
    rank_server.main()


if __name__ == "__main__":
    main()
