"""Write metric records to TensorBoard and Weights & Biases files, and read them back with the readers of both
packages."""

from __future__ import annotations

import errno
import json
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatron.core.config.model import TransformerConfig
from megatron.extensions.observe.logs.dashboards import TensorBoardSink
from megatron.extensions.observe.logs.flags import LogsConfig
from megatron.extensions.observe.logs.megatron_format import scalars, tag_of
from megatron.training.config.flags import config_of_sections
from megatron.training.config.run_config import CheckpointConfig, LoggingConfig, RunConfig
from megatron.training.metrics.sinks import open_sinks


def record(iteration: int, **more: float) -> dict[str, Any]:
    values = {"iteration": iteration, "consumed_samples": 8 * iteration, "time": 1e9 + iteration, "schema": 1}
    return values | {"lm_loss": 9.0 - iteration, "learning_rate": 0.1, "mfu": None, "my_metric": 2.0} | more


def configuration(folder: Path, **options: Any) -> RunConfig:
    logging = LoggingConfig(metrics_file=str(folder / "metrics.jsonl"))
    model = TransformerConfig(hidden_size=64)
    return RunConfig(logging=logging, model=model).with_options(LogsConfig(**options))


def run(folder: Path, first: int, last: int, **options: Any) -> None:
    """Write the records of a run for the iterations from `first` to `last`."""
    sinks = open_sinks(configuration(folder, **options), first - 1)
    for iteration in range(first, last + 1):
        for sink in sinks:
            sink.write(record(iteration))
    for sink in sinks:
        sink.close()


def log_records(content: bytes) -> Iterator[bytes]:
    """Yield the records in the file of an offline Weights & Biases run. After a header of 7 bytes, the file consists of
    blocks of 32 KiB in LevelDB's log format.

    Each chunk of a block has a checksum, a length, and a kind: whole, first, middle or last.
    """
    at, record = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def test_logging_flags_of_older_checkpoints_are_kept() -> None:
    saved = {"logging": {"tensorboard_dir": "board", "log_interval": 7, "wandb_project": "p"}}
    config = config_of_sections(saved)
    assert config.options(LogsConfig) == LogsConfig(tensorboard_dir="board", wandb_project="p")
    assert config.logging == LoggingConfig(log_interval=7)


def test_tags_match_megatron() -> None:
    found = dict.fromkeys(tag for tag, _, _ in scalars(record(1, mtp_loss_2=1.0, valid_loss=2.0, grad_norm=1.0)))
    assert list(found) == [
        *("consumed_samples", "time", "lm loss", "lm loss vs samples", "learning-rate", "learning-rate vs samples"),
        *("my_metric", "mtp_2 loss", "lm loss validation", "lm loss validation vs samples"),
        *("grad-norm", "grad-norm vs samples"),
    ]
    assert tag_of("valid_perplexity") == "lm loss validation ppl" and tag_of("test_books_loss") == "lm loss test books"
    assert tag_of("source_web_loss") == "lm loss source web"
    assert tag_of("valid_source_web_loss") == "lm loss validation source_web"


def test_table_values_are_tagged_with_their_row_number() -> None:
    table = {"layer": [0, 4], "expert_load": [None, [0.5, 1.5]], "output_gain": [None, 1.5], "output_rms": [2.0, 3.0]}
    found = {"iteration": 5, "layers": table, "parameters": {"decoder.layers.1.b": {"grad_norm": 4.0}}}
    assert list(scalars(found)) == [
        ("layers/expert_load_max/4", 1.5, 5),
        ("layers/output_gain/4", 1.5, 5),
        ("layers/output_rms/0", 2.0, 5),
        ("layers/output_rms/4", 3.0, 5),
    ]


def test_a_resumed_run_hides_only_the_records_that_it_rewrites(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # Only the second run rewrites a step that has a record, and hides this record.
    for first, last in ((1, 6), (4, 12), (11, 14)):
        run(tmp_path, first, last, tensorboard_dir=str(tmp_path / "board"))
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert [event.step for event in events.Scalars("lm loss")] == list(range(1, 15))
    assert [event.step for event in events.Scalars("lm loss vs samples")] == list(range(8, 120, 8))
    assert [event.wall_time for event in events.Scalars("learning-rate vs samples")] == [1e9 + n for n in range(1, 15)]
    (text,) = events.Tensors("config/text_summary")[-1].tensor_proto.string_val
    assert "| hidden_size | 64 |" in text.decode()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_costs_tensorboard_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The thread of the TensorBoard writer fails at records 3 and 4. The run detects the failure later, continues
    training, and writes the lost records again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder, now, full = tmp_path / "board", [0.0], [False]
    true = RecordWriter.write

    def write(self: Any, data: bytes) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        true(self, data)

    monkeypatch.setattr(RecordWriter, "write", write)
    monkeypatch.setattr("megatron.extensions.observe.logs.dashboards.time.monotonic", lambda: now[0])
    _, sink = open_sinks(configuration(tmp_path, tensorboard_dir=str(folder)), 0)
    assert isinstance(sink, TensorBoardSink)
    for iteration in range(1, 9):
        full[0] = iteration in (3, 4)
        now[0] += 200 if iteration == 6 else 1
        sink.write(record(iteration))
        with suppress(OSError):
            if sink._writer is not None:
                sink._writer.flush()
    sink.close()
    events = EventAccumulator(str(folder))
    events.Reload()
    assert {event.step for event in events.Scalars("lm loss")} == set(range(1, 9))
    assert capsys.readouterr().err.count("cannot write events to") == 1


@pytest.mark.parametrize("save", ["save", None])
def test_weights_and_biases_files_are_in_the_run_folder_or_absent(
    save: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TMPDIR": str(tmp_path / "tmp")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("WANDB_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    for name in ("tmp", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    config = RunConfig(checkpoint=CheckpointConfig(save=None if save is None else str(tmp_path / save)))
    for sink in open_sinks(config.with_options(LogsConfig(wandb_project="p")), 0):
        sink.close()
    wandb.teardown()
    (place,) = (tmp_path / save,) if save else (tmp_path / "tmp").glob("wandb-*")
    assert (place / "wandb_run_id.txt").exists() and list((place / "wandb").glob("offline-run-*"))
    assert [path.name for path in (tmp_path / "here").iterdir()] == ([] if save else ["metrics.jsonl"])


def test_a_requeued_run_is_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for start in range(1, 10, 3):
        run(tmp_path, start, start + 2, wandb_project="p", wandb_save_dir=str(tmp_path))
    wandb.teardown()
    ids, losses = set(), {}
    for path in sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in log_records(path.read_bytes()):
            found = wandb_internal_pb2.Record()
            found.ParseFromString(data)
            if found.HasField("run"):
                ids.add(found.run.run_id)
            values = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in found.history.item}
            if "lm loss" in values:
                losses[values["_step"]] = values["lm loss"]
    assert len(ids) == 1 and losses == {n: 9.0 - n for n in range(1, 10)}
    run(tmp_path, 1, 1, wandb_project="p", wandb_save_dir=str(tmp_path))
    assert (tmp_path / "wandb_run_id.txt").read_text().strip() not in ids
    wandb.teardown()
