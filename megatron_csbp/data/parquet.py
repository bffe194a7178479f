# SPDX-License-Identifier: Apache-2.0
"""Reads Parquet files row by row, if `pyarrow` is installed (the extra `parquet`)."""

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUFFIXES = (".parquet",)
_ROWS = 256


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file as objects, a few hundred in memory at a time.

    Raises:
        ValueError: pyarrow is not installed, or the file is none of Parquet's.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError(
            f"--input file {path} is a Parquet file, and the package pyarrow, which reads them, is not installed. "
            "Install it with pip install 'megatron-csbp[parquet]', or convert the file to JSON Lines."
        )
    arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS):
                yield from batch.to_pylist()
    except (arrow.ArrowException, EOFError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"--input file {path} cannot be read as Parquet: {reason} Copy it again, or name its format with --format."
        ) from error
