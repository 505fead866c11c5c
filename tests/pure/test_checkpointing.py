"""Tests of saving and loading a one-process run. The tests cover the resumed state, checkpoints that are refused, and
untrusted files."""

from __future__ import annotations

import json
import os
import pickle
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron.core.config.data import TokenizerConfig
from megatron.core.config.model import TransformerConfig
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.dist_checkpointing.integrity import MANIFEST, write_manifest
from megatron.core.dist_checkpointing.path_kind import read_latest
from megatron.core.dist_checkpointing.storage import Checkpoint
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel, WeightSetup
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Update
from megatron.core.optimizer.optimizer import Rates
from megatron.core.parallel_state import ParallelState
from megatron.core.tokenizers import build_tokenizer
from megatron.training.checkpoints.checkpointing import RunCheckpoint, load_whole_model
from megatron.training.config.flags import run_of
from megatron.training.config.run_config import CheckpointConfig, RunConfig, TrainingConfig
from megatron.training.config.saved_flags import changed_fields
from megatron.training.hooks import Callback
from megatron.training.progress import Progress
from tests.gpt_cases import GPT, LLAMA, random_batch
from tests.moe_cases import DEEPSEEK
from tools import inspect_checkpoint

STATE = ParallelState()


@dataclass
class Run:
    """Model and optimizer of a run, whose steps use artificial gradients."""

    config: RunConfig
    callbacks: Sequence[Callback] = ()
    said: list[str] = field(default_factory=list)
    stages: dict[int, GPTModel] = field(init=False)
    optimizer: DistributedOptimizer = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        self.stages = {0: GPTModel(config.model, config.parallel, weights=WeightSetup(seed=config.training.seed))}
        stages, options = list(self.stages.values()), config.optimizer
        ddp = DistributedDataParallel(config.ddp, config.parallel, STATE, stages, options)
        self.optimizer = DistributedOptimizer(config.optimizer, ddp, STATE)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for param in self.stages[0].parameters():
            if param.requires_grad:
                param.main_grad.copy_(torch.randn(param.shape, generator=generator))
            else:  # expert biases
                param.data.copy_(torch.randn(param.shape, generator=generator))
        self.optimizer.step(Update(Rates(1e-2, 0.01)))

    def save(self, progress: Progress) -> Path:
        return self.checkpoint().save(progress)

    def checkpoint(self) -> RunCheckpoint:
        return RunCheckpoint(self.config, STATE, self.stages, self.optimizer, callbacks=self.callbacks)

    def load(self, data_fingerprint: str | None = None) -> Progress:
        return self.checkpoint().load(self.said.append, data=lambda consumed: data_fingerprint)

    def tensors(self) -> dict[str, torch.Tensor]:
        pieces = {f"{piece.key} {piece.meta.name}": piece.data for piece in self.optimizer.sharded_state()}
        return pieces | dict(self.stages[0].named_parameters())


def config(root: Path, **changes: object) -> RunConfig:
    """Return a run configuration. `changes` contains new values of fields of CheckpointConfig, or entire sections of
    the configuration."""
    sections = {name: changes.pop(name) for name in ("model", "parallel", "optimizer", "training") if name in changes}
    base = RunConfig(
        model=LLAMA,
        optimizer=OptimizerConfig(lr=1e-2),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer"),
        checkpoint=CheckpointConfig(save=str(root), load=str(root), **changes),
    )
    return replace(base, **sections)


def refuses(match: str, root: Path, **changes: object) -> None:
    """Assert that a run with the configuration `config(root, **changes)` refuses to load the checkpoint in `root`, and
    that the error message matches `match`."""
    with pytest.raises(ValueError, match=match):
        Run(config(root, **changes)).load()


def assert_same(one: Run, two: Run) -> None:
    a, b = one.tensors(), two.tensors()
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


BF16, FP16, FP32 = ModelParallelConfig(bf16=True), ModelParallelConfig(fp16=True), ModelParallelConfig()


@pytest.mark.parametrize("parallel", [FP32, BF16, FP16, ModelParallelConfig(fp64=True)], ids=["32", "b16", "f16", "64"])
def test_a_resumed_run_continues_bitwise(tmp_path: Path, parallel: ModelParallelConfig) -> None:
    one = Run(config(tmp_path, parallel=parallel, model=DEEPSEEK))
    for number in range(2):
        one.step(number)
    progress = Progress(iteration=2, consumed_samples=16, skipped_iterations=1, data_fingerprint="f")
    one.save(progress)
    two = Run(replace(one.config, training=TrainingConfig(micro_batch_size=2)))
    assert two.load() == progress and read_latest(tmp_path) == 2
    assert_same(one, two)
    for run in (one, two):
        run.step(7)
    assert_same(one, two)
    assert two.optimizer.step_count == one.optimizer.step_count
    assert two.optimizer.scaler.state_dict() == one.optimizer.scaler.state_dict()


def test_an_empty_folder_loads_nothing(tmp_path: Path) -> None:
    assert Run(config(tmp_path)).load() == Progress()
    assert Run(replace(config(tmp_path), checkpoint=CheckpointConfig())).load() == Progress()
    refuses("drop --exit-on-missing-checkpoint", tmp_path, exit_on_missing_checkpoint=True)
    refuses(r"--finetune needs a checkpoint, and --load .* holds no checkpoint", tmp_path, finetune=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("")
    refuses("must contain an iteration number", tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    refuses("its folder does not exist", tmp_path)


def test_one_line_names_the_checkpoint_and_the_first_iteration(tmp_path: Path) -> None:
    def said(**options: object) -> str:
        run, lines = Run(config(tmp_path, **options)), list[str]()
        RunCheckpoint(run.config, STATE, run.stages, run.optimizer).load(lines.append)
        (line,) = lines
        return line.strip()

    fresh = said()
    assert fresh.startswith(f"no checkpoint in --load {tmp_path}: starting at iteration 0 with random weights; ")
    assert "--exit-on-missing-checkpoint" in fresh
    Run(config(tmp_path)).save(Progress(4, 32))
    assert said() == f"loaded checkpoint of iteration 4 from {tmp_path}: starting at iteration 4"
    weights = f"loaded weights of iteration 4 from {tmp_path}: starting at iteration"
    assert said(load_optim=False) == f"{weights} 4 with a fresh optimizer"
    assert said(finetune=True) == f"{weights} 0 with a fresh optimizer"
    anew = said(reset_iteration=True)
    assert anew == f"loaded checkpoint of iteration 4 from {tmp_path}: starting at iteration 0"


@pytest.mark.parametrize(("saved", "loaded"), [(BF16, FP32), (FP32, BF16), (BF16, FP16)], ids=["up", "down", "across"])
def test_precision_may_change(tmp_path: Path, saved: ModelParallelConfig, loaded: ModelParallelConfig) -> None:
    one, two = Run(config(tmp_path, parallel=saved)), Run(config(tmp_path, parallel=loaded))
    one.step(0)
    one.save(Progress(1, 8))
    two.load()
    a, b = one.tensors(), two.tensors()
    dtype = getattr(torch, loaded.params_dtype)
    for name, param in two.stages[0].named_parameters():
        main = f"main_param {param.meta.name}"
        highest = a.get(main, a[name].reshape(-1))
        assert torch.equal(param.reshape(-1), highest.to(dtype)), name
        assert main not in b or torch.equal(b[main], highest.float()), name
        assert torch.equal(b[f"exp_avg {param.meta.name}"], a[f"exp_avg {param.meta.name}"])


def test_a_run_restarts_with_its_moments(tmp_path: Path) -> None:
    one = Run(config(tmp_path, parallel=BF16))
    one.step(0)
    one.save(Progress(5, 40, 30, data_fingerprint="a", origin={"model_type": "opt"}))
    with pytest.raises(
        ValueError, match=r"--override-data-fingerprint to .*, or --data-phases to continue with other data"
    ):
        Run(config(tmp_path)).load(data_fingerprint="b")
    for options, data, there in (
        ({"reset_iteration": True}, "b", Progress(data_fingerprint="b")),
        ({"load_lr_state": False}, "a", Progress(5, 40, 0, data_fingerprint="a")),
    ):
        two = Run(config(tmp_path, parallel=BF16, **options))
        found = two.load(data_fingerprint=data)
        assert found == there and found.origin == {"model_type": "opt"}
        assert two.optimizer.step_count == 1
        assert all(torch.equal(tensor, one.tensors()[name]) for name, tensor in two.tensors().items())


@pytest.mark.parametrize("options", [{"finetune": True}, {"load_optim": False}], ids=["finetune", "no-load-optim"])
def test_only_weights_are_loaded_on_request(tmp_path: Path, options: dict[str, bool]) -> None:
    """The loaded weights include the expert biases, which belong to the model although they have no gradients."""
    one = Run(config(tmp_path, parallel=BF16, model=DEEPSEEK, save_optim=False))
    one.step(0)
    one.save(Progress(5, 40))
    refuses("add --no-load-optim", tmp_path, parallel=BF16, model=DEEPSEEK)
    two = Run(config(tmp_path, parallel=BF16, model=DEEPSEEK, **options))
    assert two.load() == (Progress() if "finetune" in options else Progress(5, 40))
    assert two.optimizer.step_count == 0
    for name, param in two.stages[0].named_parameters():
        assert torch.equal(param, one.tensors()[name])
        if not param.requires_grad:
            assert name.endswith("expert_bias") and param.any()
            continue
        assert torch.equal(two.tensors()[f"main_param {param.meta.name}"], param.reshape(-1).float())
        assert not two.tensors()[f"exp_avg {param.meta.name}"].any()


def test_another_run_is_refused_with_all_differences(tmp_path: Path) -> None:
    Run(config(tmp_path)).save(Progress(1, 8))
    model = replace(LLAMA, hidden_size=64, rotary_base=5e5, recompute_granularity="full")
    other = config(tmp_path, model=model, training=TrainingConfig(seed=1), optimizer=OptimizerConfig("sgd", lr=1e-2))
    with pytest.raises(ValueError, match="does not fit") as error:
        Run(other).load()
    message = str(error.value)
    for part in (
        "--hidden-size 32 in the checkpoint, 64 in the run",
        "--rotary-base 10000.0 in the checkpoint, 500000.0 in the run",
        "--seed is 1234 in the checkpoint but 1 in the run",
        "--no-load-rng",
        "--optimizer is adam in the checkpoint but sgd in the run",
    ):
        assert part in message
    assert "recompute" not in message
    refuses(
        r"of another shape: .*model\.decoder\.final_layernorm\.weight \(32,\)", tmp_path, model=model, finetune=True
    )
    longer = replace(LLAMA, seq_length=32)
    new_phase = "or --data-phases to continue with other data or another sequence length in a new phase"
    refuses(f"--seq-length 16 in the checkpoint, 32 in the run; .*{new_phase}", tmp_path, model=longer)
    assert new_phase not in message
    assert Run(config(tmp_path, model=longer, finetune=True)).load() == Progress()
    assert Run(config(tmp_path, training=TrainingConfig(seed=1), load_rng=False)).load() == Progress(1, 8)
    deeper = replace(LLAMA, num_layers=3)
    refuses(r"missing from the checkpoint: model\.decoder\.layers\.2\.", tmp_path, model=deeper, finetune=True)
    shallower = replace(LLAMA, num_layers=1)
    refuses(
        r"in the checkpoint but not in the run: model\.decoder\.layers\.1\.", tmp_path, model=shallower, finetune=True
    )


def test_a_larger_vocabulary_than_the_checkpoints(tmp_path: Path) -> None:
    """The error message explains how to add tokens. With --finetune, padding rows of the embedding become tokens, and a
    message reports this."""
    Run(config(tmp_path)).save(Progress(1, 8))
    tokens = LLAMA.vocab_size or 0
    more = replace(LLAMA, vocab_size=LLAMA.padded_vocab_size)
    beyond = replace(LLAMA, vocab_size=LLAMA.padded_vocab_size + 1)
    way = f"its vocabulary has {tokens} tokens, but the run's has .*: to add tokens, convert it to a Hugging"
    refuses(way, tmp_path, model=more)
    refuses(way, tmp_path, model=beyond, finetune=True)
    run = Run(config(tmp_path, model=more, finetune=True))
    assert run.load() == Progress()
    assert f" tokens {tokens} to {LLAMA.padded_vocab_size - 1} use untrained rows that padded" in run.said[0]


def test_without_a_schedule_position_the_consumed_samples_count(tmp_path: Path) -> None:
    run = Run(config(tmp_path))
    folder = run.save(Progress(3, 24, scheduled_samples=16))
    assert run.load().scheduled_samples == 16
    change_metadata(folder, lambda payload: payload.pop("scheduled_samples"))
    assert run.load().scheduled_samples == 24


def changed_models(saved: TransformerConfig, run: TransformerConfig) -> list[str]:
    return changed_fields(run_of(saved), run_of(run), ["model"])


def test_equivalent_model_flags_are_equal() -> None:
    said = replace(LLAMA, kv_channels=LLAMA.head_dim, max_position_embeddings=LLAMA.seq_length)
    assert changed_models(LLAMA, said) == []
    assert changed_models(GPT, replace(GPT, hidden_size=2 * GPT.hidden_size, vocab_size=500)) == [
        f"--hidden-size {GPT.hidden_size} in the checkpoint, {2 * GPT.hidden_size} in the run",
        f"--vocab-size {GPT.vocab_size} in the checkpoint, 500 in the run",
    ], "without what follows from them"
    assert changed_models(GPT, replace(GPT, kv_channels=2 * GPT.head_dim)) == [
        f"--kv-channels {GPT.head_dim} in the checkpoint, {2 * GPT.head_dim} in the run"
    ]
    assert changed_models(GPT, replace(GPT, add_bias_linear=False)) == [
        "--disable-bias-linear True in the checkpoint, False in the run"
    ]


@pytest.mark.parametrize("parallel", [FP32, BF16], ids=["fp32", "bf16"])
def test_inference_needs_only_the_folder(tmp_path: Path, parallel: ModelParallelConfig) -> None:
    run = Run(config(tmp_path, model=GPT, parallel=replace(parallel, sequence_parallel=True)))
    run.step(0)
    run.save(Progress(1, 8))
    for path in (tmp_path, tmp_path / "iter_0000001"):
        model, saved = load_whole_model(path)
        tokenizer = build_tokenizer(saved.tokenizer, saved.model.vocab_size)
        assert saved == run.config.with_options(*saved.extension_options)
        assert tokenizer.vocab_size == GPT.vocab_size and not model.training
        batch = random_batch(GPT)
        run.stages[0].eval()
        assert torch.equal(model.logits(None, batch), run.stages[0].logits(None, batch))
    with pytest.raises(ValueError, match="elsewhere is missing"):
        load_whole_model(tmp_path / "elsewhere")


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    folder = Run(config(tmp_path)).save(Progress(1, 8))
    change_metadata(folder, lambda payload: payload.update(format_version=99))
    refuses("format version 99", tmp_path)


def list_anew(folder: Path) -> None:
    """Rewrite the checkpoint's manifest so that it matches the changed files, as an attacker would."""
    files = [path for path in folder.iterdir() if path.name != MANIFEST]
    sums = {path.name: {"bytes": path.stat().st_size, "crc32": zlib.crc32(path.read_bytes())} for path in files}
    write_manifest(folder, sums)


def change_metadata(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edit the metadata of a checkpoint, and rewrite the manifest to match."""
    path = folder / "metadata.json"
    payload = json.loads(path.read_text())
    change(payload)
    path.write_text(json.dumps(payload))
    list_anew(folder)


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize(
    ("name", "value"), [("iteration", "six"), ("iteration", -6), ("config", [1]), ("optimizer", None)]
)
def test_an_error_about_foreign_metadata_names_the_field(tmp_path: Path, name: str, value: object) -> None:
    folder = Run(config(tmp_path)).save(Progress(1, 8))
    change_metadata(folder, lambda payload: payload.update({name: value}))
    refuses(f"iter_0000001: metadata.json is damaged: {name} must be ", tmp_path)


def test_a_foreign_index_runs_no_code(tmp_path: Path) -> None:
    folder = Run(config(tmp_path)).save(Progress(1, 8))
    (folder / ".metadata").write_bytes(pickle.dumps(Malicious(tmp_path / "harmed")))
    list_anew(folder)
    refuses(r"asks for posix\.system", tmp_path)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    "damage", [b"", b"\x80\x04garbage", pickle.dumps([1, 2]), pickle.dumps(Metadata(cast("dict", None), None, {}))]
)
def test_a_damaged_index_is_an_error_that_names_the_checkpoint(tmp_path: Path, damage: bytes) -> None:
    folder = Run(config(tmp_path)).save(Progress(1, 8))
    (folder / ".metadata").write_bytes(damage)
    list_anew(folder)
    refuses("iter_0000001 is not a readable checkpoint", tmp_path)


def test_inspection_describes_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, other = (Run(config(tmp_path / name)) for name in ("one", "two", "other"))
    for run in (one, two, other):
        run.step(0)
    with torch.no_grad():
        other.stages[0].decoder.layers[1].mlp.linear_fc1.weight[1, 5, 3] += 1
        other.stages[0].decoder.layers[0].mlp.linear_fc1.weight[0, :2] += 2
    for run in (one, two, other):
        run.save(Progress(1, 8))
    assert inspect_checkpoint.main([str(tmp_path / "one")]) == 0
    shown = capsys.readouterr().out
    assert "iteration          1" in shown and "tp=1" in shown and "checksums verified" in shown
    assert "model.decoder.layers.0.mlp.linear_fc2.weight" in shown and "(32, 48)" in shown
    assert inspect_checkpoint.main([str(tmp_path / "one"), str(tmp_path / "two" / "iter_0000001")]) == 0
    assert "equal" in capsys.readouterr().out
    assert inspect_checkpoint.main([str(tmp_path / "one"), str(tmp_path / "other")]) == 1
    shown = capsys.readouterr().out
    assert "model.decoder.layers.0.mlp.linear_fc1.weight  64 of 3,072 elements differ, by 2 at most" in shown
    assert "model.decoder.layers.1.mlp.linear_fc1.weight  1 of 3,072 elements differ, by 1 at most" in shown
    assert f"2 of {len(Checkpoint(tmp_path / 'one' / 'iter_0000001').tensors)} tensors differ:" in shown
    monkeypatch.setattr(inspect_checkpoint, "MOST_LINES", 1)
    assert inspect_checkpoint.main([str(tmp_path / "one"), str(tmp_path / "other")]) == 1
    line = "layers.*.mlp.linear_fc1.weight  2 of 2 layers: 65 of 6,144 elements differ, by 2 at most, in layer 0"
    assert line in capsys.readouterr().out
    assert inspect_checkpoint.main([str(tmp_path / "none")]) == 2


class Keeps(Callback):
    """Callback whose state is a list."""

    def __init__(self, kept: Any, name: str = "") -> None:
        super().__init__(RunConfig())
        self.kept, self.name = kept, name

    def state(self) -> Any:
        return self.kept

    def load_state(self, state: Any) -> None:
        self.kept = state


def test_callback_states_are_restored(tmp_path: Path) -> None:
    callbacks = [Keeps([1, {"a": None}], "one"), Keeps(2.5), Keeps(None, "stateless")]
    folder = Run(config(tmp_path), callbacks).save(Progress(1, 8))
    again = Run(config(tmp_path), [Keeps(None, "one"), Keeps(7, "new"), Keeps(None)])
    again.load()
    assert [callback.kept for callback in again.callbacks] == [[1, {"a": None}], 7, 2.5]
    assert not any("ignored" in line for line in again.said)

    (alone := Run(config(tmp_path))).load()
    told = "the checkpoint has state of callbacks that are not in this run, which is ignored: one, Keeps"
    assert [line.strip() for line in alone.said if "ignored" in line] == [told]
    anew = Run(config(tmp_path, reset_iteration=True), [Keeps(3, "one")])
    anew.load()
    assert anew.callbacks[0].kept == 3

    change_metadata(folder, lambda payload: payload.pop("callbacks"))
    earlier = Run(config(tmp_path), [Keeps(4, "one")])
    assert earlier.load().iteration == 1 and earlier.callbacks[0].kept == 4


def test_later_changes_do_not_reach_a_saved_state(tmp_path: Path) -> None:
    run = Run(config(tmp_path), [callback := Keeps([1])])
    _, payload = run.checkpoint().contents(Progress(1, 8))
    # The next step changes the state while the checkpoint is still being written in the background.
    callback.kept.append(2)
    assert payload["callbacks"] == {"Keeps": [1]}


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        ([torch.ones(1)], "callback Keeps: state() must return values of JSON's types only: Object of type Tensor"),
        ([1, 2], "two callbacks named Keeps keep state in checkpoints: give one of them another `name`"),
    ],
)
def test_a_state_that_cannot_be_kept_is_refused(tmp_path: Path, kept: list[Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        Run(config(tmp_path), [Keeps(each) for each in kept]).save(Progress(1, 8))
