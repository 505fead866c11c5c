"""tools/inspect_dataset.py shows samples of data sets that only a later phase uses."""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset
from tools import inspect_dataset

FIXTURES = Path(__file__).parents[2] / "fixtures" / "megatron_order"


def test_a_sample_of_a_later_phase_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alpha, beta = FIXTURES / "alpha", FIXTURES / "beta"
    tokens = IndexedDataset(str(beta)).get(0, 0, 5).astype(np.int64)
    record = {
        "iteration": 3,
        "samples": [8, 8],
        "origins": ["beta:0+0"],
        "documents": [[[0, 0, 5]]],
        "crc32": [f"{zlib.crc32(tokens[:-1].tobytes()):08x}"],
    }
    (log := tmp_path / "samples.jsonl").write_text(json.dumps(record) + "\n")
    (phases := tmp_path / "phases.yaml").write_text(
        f"- {{name: first, from-iterations: 0}}\n- {{name: second, from-iterations: 2, data-path: {beta}}}\n"
    )
    argv = ["--sample-log", str(log), "--step", "3", "--data-path", str(alpha)]
    with pytest.raises(ValueError, match="the log names the data set beta, but the given ones are alpha"):
        inspect_dataset.main(argv)
    assert inspect_dataset.main([*argv, "--data-phases", str(phases)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert {"sample 8, beta:0+0", "  document 0, tokens 0 to 4"} <= {*shown}
    dump = ["--data-path", str(alpha), "--dump", str(tmp_path / "x.npz"), "--data-phases", str(phases)]
    with pytest.raises(ValueError, match="--dump with --data-phases"):
        inspect_dataset.main(dump)
