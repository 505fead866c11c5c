"""After a rank dies, torchrun restarts all ranks within the same job, and they resume from the latest checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

from tests.faults.runs import MODEL, run_with_fault
from tests.forked import run_forked
from tools.inspect_checkpoint import differences, open_or_complain

FLAGS = ("--pp 1 --train-iters 8 --log-interval 1 --save-interval 2 --no-async-save --hidden-dropout 0.1").split()


def test_a_restart_by_torchrun_ends_like_the_undisturbed_run(tmp_path: Path) -> None:
    undisturbed = tmp_path / "undisturbed"
    run_forked(2, [*MODEL, *FLAGS, "--save", str(undisturbed)], tmp_path / "forked")
    ended = run_with_fault("kill", tmp_path, *FLAGS, rank=1, step=6, processes=2, max_restarts=1)
    assert ended.code == 0 and not ended.left, ended.screen
    assert re.search(r"RUN FAILED: rank 1 of 2", ended.screen)
    assert "loaded checkpoint of iteration 4" in ended.screen
    one, other = open_or_complain(undisturbed), open_or_complain(tmp_path / "save")
    assert one.payload["iteration"] == other.payload["iteration"] == 8
    assert not differences(one, other)


def test_torchrun_does_not_restart_after_a_signal(tmp_path: Path) -> None:
    ended = run_with_fault("user_signal", tmp_path, "--pp", "1", rank=1, processes=2, max_restarts=1)
    assert ended.code == 0 and not ended.left, ended.screen
    saved = int((tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text())
    assert f"exiting at iteration {saved}: SIGUSR1 on rank 1 of 2" in ended.screen
    assert ended.screen.count("start-up (s)") == 1 and "RUN FAILED" not in ended.screen
