# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import numpy as np
import pytest

from megatron_csbp.data.indexed_files import PreparedMetadata
from megatron_csbp.reporting import packing_report
from megatron_csbp.reporting.packing_report import packing_lines
from tests.unit_tests.data.support import megatron_args, write_indexed


def arguments(prefixes: list[str], **changes: object) -> object:
    weighted = [word for prefix in prefixes for word in ("1", prefix)]
    return megatron_args(data_path=weighted, clean_seq_length=64, diffusion_block_size=8, **changes)


def test_the_fill_and_what_is_learnt_are_said(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "a", [np.ones(30)] * 4)
    (line,) = packing_lines(arguments([prefix]))
    assert line == f"  packing: {prefix}: 4 documents; their blocks fill 100.0% of the samples, their tokens 93.8%"
    metadata = PreparedMetadata(
        tokenizer="t",
        vocab_size=8,
        max_token_id=1,
        tokens=120,
        documents=4,
        supervised_tokens=12,
        answers_found_by=["turn boundaries"],
    )
    Path(f"{prefix}.meta.json").write_text(metadata.to_json())
    (line,) = packing_lines(arguments([prefix]))
    assert line.endswith("; 10.0% of the tokens are learnt (by turn boundaries)")
    (line,) = packing_lines(arguments([prefix], loss_on="all"))
    assert line.endswith("their tokens 93.8%")


def test_of_many_documents_some_are_packed_and_of_many_datasets_the_first_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing_report, "_PACKED_DOCUMENTS", 2)
    monkeypatch.setattr(packing_report, "_DATASETS", 1)
    prefixes = [write_indexed(tmp_path / name, [np.ones(70)] * 4) for name in ("a", "b")]
    first, more = packing_lines(arguments(prefixes))
    assert "4 documents; their blocks fill 100.0% of the samples (of 2 of them), their tokens 100.0%" in first
    assert more == "    ... and 1 more datasets"
