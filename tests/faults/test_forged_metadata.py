"""Tests of metadata.json files that have correct checksums but contain values of wrong types. Every reader refuses such
a file in one line that names the file, the entry and the entry's rule."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing.integrity import read_manifest, write_manifest, write_summed
from megatron.core.dist_checkpointing.storage import CheckpointError
from megatron.core.parallel_state import Axis
from megatron.extensions.interop.conversion.dcp_format import DCPSource
from megatron.extensions.interop.conversion.formats import Options
from megatron.training.checkpoints.loading import (
    check_fits,
    choose_checkpoint,
    saved_config,
    saved_progress,
    tell_of_other_groups,
)
from megatron.training.config.arguments import parse_args
from megatron.training.config.rules.saved_types import metadata_problem
from megatron.training.config.saved_flags import changed_lengths, read_history, with_past_batches, with_saved_flags
from megatron.training.config.validation import resolve
from megatron.training.plan import plan_of
from tests.forked import run_program
from tools import inspect_checkpoint
from tools.pictures.run_folder import read_metrics

MODEL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 2 --lr 1e-3 --mock-data --vocab-size 64 --cpu"
).split()

WRONG: list[Any] = [None, [], {}, "x", 10**40, float("nan"), -7, 0.5, True, [[{"a": [1]}]]]
"""Values of several types. For each metadata entry, readers must refuse the values that do not have the type of the
entry."""

ANYTHING = ("origin", "layout", "callbacks", "rng", "metrics", "config", "model_of_run", "converted")
"""Entries that may contain any value: some contain data of a program or an extension, and readers use only the known
parts of the others."""

Place = tuple[str | int, ...]


def places(value: Any, where: Place = ()) -> Iterator[Place]:
    """Yield the path of every value that is nested in a JSON value."""
    if where:
        yield where
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in entries:
        yield from places(each, (*where, key))


def replaced(values: dict[str, Any], where: Place, new: Any) -> dict[str, Any]:
    """Return a copy of `values` in which the value at the path `where` is replaced with `new`."""
    inner: Any = (whole := values.copy())
    for key in where[:-1]:
        inner[key] = inner[key].copy()
        inner = inner[key]
    inner[where[-1]] = new
    return whole


def shown(where: Place) -> str:
    """Return a path in the form that messages show."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in where)[1:]


class Saved:
    """Run folder with one checkpoint whose metadata can be replaced."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / "iter_0000002"
        self.whole: dict[str, Any] = json.loads((self.folder / "metadata.json").read_text())
        self._sums = read_manifest(self.folder)

    def forge(self, values: dict[str, Any]) -> None:
        sums = write_summed(self.folder / "metadata.json", json.dumps(values))
        write_manifest(self.folder, self._sums | {"metadata.json": sums})


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    run_program("pretrain_gpt.py", *MODEL, "--train-iters", 2, "--save", folder, code=0)
    return folder


@pytest.fixture
def saved(run_folder: Path, tmp_path: Path) -> Saved:
    return Saved(Path(shutil.copytree(run_folder, tmp_path / "run")))


def readers(root: Path) -> list[Callable[[], object]]:
    """Return functions that read a checkpoint's metadata without reading tensors. The functions read the metadata as
    the following programs do: a run that resumes (flags, plan and state), the tools that inspect and convert
    checkpoints, and the tool that plots metrics."""
    run = parse_args([*MODEL, "--train-iters", "4", "--load", str(root), "--save", str(root)])
    asks = replace(run.checkpoint, use_checkpoint_args=True, use_checkpoint_opt_param_scheduler=True)

    def flags() -> None:
        with_past_batches(with_saved_flags(replace(run, checkpoint=asks))[0])
        config = resolve(with_past_batches(run), 1)
        plan_of(config).continued(read_history(config.checkpoint))

    def state() -> None:
        checkpoint, config = choose_checkpoint(root, Axis()), resolve(run, 1)
        assert checkpoint is not None
        check_fits(checkpoint, config, True, None)
        before, progress = saved_config(checkpoint), saved_progress(checkpoint.payload)
        changed_lengths(before, config)
        tell_of_other_groups(before, config, print)
        plan_of(config).changed_batch(before, progress.past_batches)

    return [
        flags,
        state,
        lambda: inspect_checkpoint.about_checkpoint(inspect_checkpoint.open_or_complain(root)),  # type: ignore[arg-type]
        lambda: DCPSource(root, Options()).training(),
        lambda: read_metrics(root),
    ]


def refusal_by(read: Callable[[], object]) -> str:
    """Return the error message with which a reader refuses the metadata, or "" if it accepts the metadata. Other
    exceptions propagate."""
    try:
        read()
    except (ValueError, CheckpointError) as error:
        return str(error)
    return ""


def test_a_wrong_type_anywhere_is_named(saved: Saved) -> None:
    """The test replaces every entry of the metadata file, including the entries of the saved configuration."""
    assert metadata_problem(saved.whole) is None
    count = 0
    for where in places(saved.whole):
        for new in WRONG[:: 3 if where[0] == "config" else 1]:
            problem = metadata_problem(replaced(saved.whole, where, new))
            entry = shown(where[:-1] if where[0] == "config" and isinstance(where[-1], int) else where)
            assert problem is None or (problem.startswith(entry) and "\n" not in problem), (where, new, problem)
            count += problem is not None
    assert count > 1500


def test_every_entry_of_a_run_refuses_other_types(saved: Saved) -> None:
    for where in places(saved.whole):
        if where[0] not in ANYTHING and "values" not in where:
            refused = [new for new in WRONG if metadata_problem(replaced(saved.whole, where, new)) is not None]
            assert len(refused) >= len(WRONG) - 3, where


def test_no_reader_crashes_on_a_wrong_type(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    """A value of a wrong type or size is either accepted or refused. Such a value never causes a traceback."""
    own = {name: value for name, value in saved.whole.items() if name != "config"}
    for where in [*places(own), ("config",), ("config", "model"), ("config", "model", "num_layers")]:
        for new in (None, {}, [], "x", 10**40, [[{"a": [1]}]]):
            saved.forge(replaced(saved.whole, where, new))
            for read in readers(saved.root):
                assert "\n" not in refusal_by(read), (where, new)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("entry", "value", "rule"),
    [
        ("past_batches", [[0, 0], "x"], "past_batches[1] must be a list of 2 values, but is text"),
        ("stages", [{"name": "", "first_sample": 0, "values": None}], "stages[0].planned is missing"),
        (
            "optimizer",
            {"step_count": None, "loss_scaler": {}},
            "optimizer.step_count must be a whole number from 0 to 2^53, but is null",
        ),
    ],
)
def test_programs_report_a_wrong_value_in_one_line(
    saved: Saved, tmp_path: Path, entry: str, value: Any, rule: str
) -> None:
    saved.forge(saved.whole | {entry: value})
    (saved.root / "metrics.jsonl").touch()
    for words, code in (
        (["pretrain_gpt.py", *MODEL, "--train-iters", 4, "--load", saved.root], 2),
        (["tools/inspect_checkpoint.py", saved.root], 2),
        (["tools/convert_checkpoint.py", "--input", saved.root, "--output", tmp_path / "out", "--to", "hf"], None),
        (["tools/generate_text.py", "--load", saved.root, "--prompt", "a"], 2),
    ):
        done = run_program(*words, code=code)
        assert done.returncode and "Traceback" not in done.stderr
        (line,) = [line for line in done.stderr.splitlines() if rule in line]
        assert str(saved.folder) in line and "metadata.json" in line
    run_program("tools/report.py", saved.root, "--output", tmp_path / "r.html", code=0)
    assert f"iter_0000002/metadata.json is damaged: {rule}" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("num_layers", 2**50, "layers cannot have"),
        ("mtp_num_layers", 2**50, "layers cannot have"),
        ("num_attention_heads", 0, "its --num-attention-heads: is required, and must be at least 1"),
        ("make_vocab_size_divisible_by", 0, "its --make-vocab-size-divisible-by 0: must be above 0"),
    ],
)
def test_sizes_that_no_model_has_are_refused_before_it_is_built(
    saved: Saved, field: str, value: int, rule: str
) -> None:
    saved.forge(replaced(saved.whole, ("config", "model", field), value))
    checkpoint = choose_checkpoint(saved.root, Axis())
    assert checkpoint is not None
    with pytest.raises(ValueError, match=r"metadata\.json is damaged: .*" + rule):
        saved_config(checkpoint)


def test_an_earlier_checkpoint_replaces_a_forged_one(saved: Saved) -> None:
    shutil.copytree(saved.folder, saved.root / "iter_0000001")
    saved.forge(saved.whole | {"iteration": "x"})
    said: list[str] = []
    chosen = choose_checkpoint(saved.root, Axis(), said.append)
    assert chosen is not None and chosen.folder.name == "iter_0000001"
    assert said == [
        f"skipped checkpoint {saved.folder}: metadata.json is damaged: iteration must be a whole number "
        "from 0 to 2^53, but is text"
    ]
