"""Of two runs with one --save folder the second is refused."""

from __future__ import annotations

import time
from pathlib import Path

from tests.faults.runs import MODEL
from tests.forked import forked_ranks, run_forked


def test_a_second_run_on_this_machine_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    save = tmp_path / "save"
    flags = [*MODEL, "--pp", "1", "--save", str(save), "--load", str(save)]
    with forked_ranks(2, [*flags, "--save-interval", "2"], tmp_path / "first") as first:
        while not (save / "latest_checkpointed_iteration.txt").exists():
            assert all(rank.is_alive() for rank in first), (tmp_path / "first").read_text()
            time.sleep(0.05)
        text = run_forked(4, [*flags, "--train-iters", "2"], tmp_path / "second", code=1)
        assert text.count(f"another run saves to {save}: its rank 0 is process {first[0].pid} on ") == 1, text
        assert all(rank.is_alive() for rank in first) and '"end"' not in (save / "run_events.jsonl").read_text()
        assert sorted(file.name for file in (save / "stacks").iterdir()) == ["rank-00000.txt", "rank-00001.txt"]
    assert (save / ".lease").exists()
    text = run_forked(2, [*flags, "--train-iters", "1"], tmp_path / "again")
    assert "loaded checkpoint of iteration " in text and not (save / ".lease").exists()
