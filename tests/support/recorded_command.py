# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.support.recorded_command FILE ARGUMENTS`: the training entry, with its losses in FILE."""

import sys

from tests.support.recorded_entry import run

if __name__ == "__main__":
    run({"entry": "pretrain_gpt", "records": sys.argv[1], "arguments": sys.argv[2:]})
