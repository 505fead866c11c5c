"""Tests of the choice of checkpoints to delete: first with iteration numbers alone, then with checkpoints in a
folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.config.data import DatasetConfig
from megatron.core.dist_checkpointing.path_kind import METADATA, candidates, kind_of, saved_folders
from megatron.core.dist_checkpointing.sharded_tensor import ShardedBoxes
from megatron.core.dist_checkpointing.storage import save
from megatron.core.parallel_state import Axis
from megatron.extensions.operate.checkpoint_cleanup.flags import RetentionFlags, rules
from megatron.extensions.operate.checkpoint_cleanup.retention import _link, retain, to_delete
from megatron.training.config.run_config import RunConfig

SCORES = {10: 3.0, 20: 1.0, 30: None, 40: float("nan"), 50: 2.0, 60: 1.0}


KEPT = [
    (RetentionFlags(keep_last=2), [50, 60]),
    (RetentionFlags(keep_last=99), [10, 20, 30, 40, 50, 60]),
    (RetentionFlags(keep_every=20), [20, 40, 60]),
    (RetentionFlags(keep_last=2, keep_every=30), [30, 50, 60]),
    (RetentionFlags(save_retain_best="valid_loss"), [20, 60]),
    (RetentionFlags(keep_last=2, keep_every=40, save_retain_best="valid_loss"), [20, 40, 50, 60]),
]


@pytest.mark.parametrize(("retention", "kept"), KEPT)
def test_flags_decide_which_checkpoints_are_kept(retention: RetentionFlags, kept: list[int]) -> None:
    assert [i for i in SCORES if i not in to_delete(retention, SCORES, 60, ())] == kept


@given(
    st.dictionaries(st.integers(0, 99), st.none() | st.floats(), min_size=1),
    st.builds(RetentionFlags, *[st.none() | st.integers(1, 9)] * 2, st.none() | st.just("valid_loss")),
    st.data(),
)
def test_the_newest_and_held_checkpoints_are_never_deleted(
    scores: dict, rules: RetentionFlags, data: st.DataObject
) -> None:
    newest, held = (data.draw(st.sampled_from(sorted(scores))) for _ in range(2))
    gone = to_delete(rules, scores, newest, [held])
    assert not {newest, held} & set(gone) and all(number < newest for number in gone)
    left = {number: score for number, score in scores.items() if number not in gone}
    assert to_delete(rules, left, newest, [held]) == [], "a kept checkpoint is kept again"


def test_held_best_incomplete_and_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for iteration, loss in ((1, 5.0), (2, 1.0), (3, 4.0), (4, 3.0)):
        tensor = ShardedBoxes((3,), [((0,), torch.ones(3))])
        save(tmp_path, iteration, {"a": tensor}, {"metrics": {"valid_loss": loss}}, Axis())
    (tmp_path / "iter_0000003" / "manifest.json").unlink()
    retain(RetentionFlags(keep_last=1, save_retain_best="valid_loss"), tmp_path, 4, [tmp_path / "." / "iter_0000001"])
    assert sorted(saved_folders(tmp_path)) == [1, 2, 3, 4], "the held, best, incomplete and newest checkpoints are kept"
    assert (tmp_path / "best").resolve() == (tmp_path / "iter_0000002").resolve()
    retain(RetentionFlags(keep_last=1), tmp_path, 4, [])
    assert sorted(saved_folders(tmp_path)) == [3, 4]


def test_a_file_system_without_links_gets_a_text_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the file system does not support symbolic links, a text file names the best checkpoint. If the disk is full,
    an error is raised instead."""

    def refuse(number: int) -> None:
        def symlink(*args: object, **kwargs: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "symlink", symlink)

    refuse(errno.EPERM)
    _link(tmp_path / "best", "iter_0000001")
    _link(tmp_path / "best", "iter_0000002")
    assert [path.name for path in tmp_path.iterdir()] == ["best.txt"]
    assert (tmp_path / "best.txt").read_text() == "iter_0000002\n"
    (tmp_path / "iter_0000002").mkdir()
    (tmp_path / "iter_0000002" / METADATA).write_text("{}")
    assert kind_of(tmp_path / "best") == "checkpoint"
    assert candidates(tmp_path / "best").folders == (tmp_path / "iter_0000002",)
    for text in ("../iter_0000002", "iter_0000002/..", "", "iter_0000007"):
        (tmp_path / "best.txt").write_text(text)
        assert kind_of(tmp_path / "best") == "missing" and not candidates(tmp_path / "best").folders
    refuse(errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        _link(tmp_path / "best", "iter_0000003")


def test_losses_of_other_validation_data_are_not_compared(tmp_path: Path) -> None:
    """The run's second phase uses harder validation data, so that its losses are higher. The metric is the loss of a
    named validation set."""
    for iteration, data, loss in ((1, "easy", 1.0), (2, "hard", 4.0), (3, "hard", 3.0), (4, "hard", 5.0)):
        tensor = ShardedBoxes((3,), [((0,), torch.ones(3))])
        payload = {"metrics": {"valid_web_loss": loss}, "stages": [{"values": {"data_path": [data]}}]}
        save(tmp_path, iteration, {"a": tensor}, payload, Axis())
    retain(RetentionFlags(keep_last=1, save_retain_best="valid_web_loss"), tmp_path, 4, [])
    assert sorted(saved_folders(tmp_path)) == [3, 4] and (tmp_path / "best").resolve().name == "iter_0000003"


def test_a_metric_that_no_validation_set_has_is_refused() -> None:
    config = RunConfig(data=DatasetConfig(valid=("web=a",)))
    assert not list(rules(config.with_options(RetentionFlags(save_retain_best="valid_web_loss")), 1))
    (problem,) = rules(config.with_options(RetentionFlags(save_retain_best="valid_wbe_loss")), 1)
    assert "is not a metric of this run" in str(problem) and "valid_web_loss" in str(problem)
