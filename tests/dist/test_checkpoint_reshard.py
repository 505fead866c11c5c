"""What a save writes at any layout, and what one that is cut short leaves. tests/parity/test_reshard.py loads."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing import storage
from megatron.core.dist_checkpointing.latest_checkpoint import candidates
from megatron.core.dist_checkpointing.path_kind import read_latest
from megatron.core.dist_checkpointing.sharded_tensor import OptimizerPiece
from megatron.core.dist_checkpointing.state_dict import load_targets, model_state, optimizer_key, optimizer_state
from megatron.core.dist_checkpointing.storage import Checkpoint, CheckpointError, save
from megatron.core.parallel_state import Axis, ParallelState, initialize_model_parallel
from megatron.core.param_meta import ParamMeta
from tests.harness import run_world


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: bool = True
    dtype: torch.dtype = torch.float32

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def name(self) -> str:
        return f"tp{self.tp}-pp{self.pp}-dp{self.dp}-{'zero' if self.zero else 'whole'}-{str(self.dtype)[6:]}"


LAYOUTS = [
    Layout(dp=4, zero=False),
    Layout(tp=2, dp=3),
    Layout(tp=2, pp=2, zero=False),
    Layout(pp=3),
    Layout(tp=2, dp=2, dtype=torch.bfloat16),
]
TIED = "embedding.word_embeddings.weight"


def metas(pp: int) -> dict[int, list[ParamMeta]]:
    """Per stage: every kind of parameter that the models have."""
    layer = {
        "self_attention.linear_qkv.weight": ((4, 3, 2, 5), {"tp": 0}),
        "self_attention.linear_qkv.bias": ((4, 3, 2), {"tp": 0}),
        "self_attention.linear_proj.weight": ((5, 8), {"tp": 1}),
        "mlp.linear_fc1.weight": ((2, 8, 5), {"tp": 1}),
        "input_layernorm.weight": ((5,), {}),
        "gate.scale": ((), {}),
    }
    stages: dict[int, list[ParamMeta]] = {stage: [] for stage in range(pp)}
    tied = ParamMeta(TIED, (12, 5), {"tp": 0}, shared_stages=(0, pp - 1) if pp > 1 else ())
    for number in range(3):
        for name, (shape, sharded) in layer.items():
            stages[number * pp // 3].append(ParamMeta(f"decoder.layers.{number}.{name}", shape, sharded))
    for stage in {0, pp - 1}:
        stages[stage].append(tied)
    return stages


def truth(key: str, meta: ParamMeta, dtype: torch.dtype) -> Tensor:
    """The global tensor that a key has in every test; model parameters are rounded main parameters."""
    kind = "main_param" if key.startswith("model.") else key.split(".")[1]
    generator = torch.Generator().manual_seed(sum(map(ord, f"{kind}{meta.name}")))
    values = torch.randn(meta.global_shape, generator=generator)
    return values.to(dtype) if key.startswith("model.") else values


class Stage(nn.Module):
    def __init__(self, metas: list[ParamMeta], state: ParallelState, dtype: torch.dtype, fill: bool) -> None:
        super().__init__()
        self.weights = nn.ParameterList()
        for meta in metas:
            value = local(truth(f"model.{meta.name}", meta, dtype), meta, state)
            param = nn.Parameter(value.clone() if fill else torch.full_like(value, torch.nan))
            param.meta = meta
            self.weights.append(param)


def local(whole: Tensor, meta: ParamMeta, state: ParallelState) -> Tensor:
    offset, shape = meta.box(state.coords)
    return whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


def pieces_of(stage: Stage, state: ParallelState, layout: Layout, fill: bool) -> list[OptimizerPiece]:
    """Two moments, and main parameters under bf16, over buffers cut evenly with no regard for parameters."""
    params = list(stage.weights)
    total = sum(param.numel() for param in params)
    each = -(-total // state.dp.size) if layout.zero else total
    begin = each * state.dp.rank if layout.zero else 0
    found, at = [], 0
    kinds = ["exp_avg", "exp_avg_sq"] + (["main_param"] if layout.dtype != torch.float32 else [])
    for param in params:
        start, stop = (min(max(edge - at, 0), param.numel()) for edge in (begin, begin + each))
        for kind in kinds:
            values = local(truth(f"optimizer.{kind}.", param.meta, layout.dtype), param.meta, state).reshape(-1)
            data = values[start:stop].clone()
            # In two parts, as when buckets cut a parameter.
            middle = (start + stop) // 2
            for a, b in ((start, middle), (middle, stop)):
                part = data[a - start : b - start]
                found.append(OptimizerPiece(kind, param.meta, part if fill else part.fill_(torch.nan), a, b))
        at += param.numel()
    return found


def parts(layout: Layout, fill: bool) -> tuple[ParallelState, Stage, list[OptimizerPiece]]:
    state = initialize_model_parallel(layout.tp, layout.pp)
    return state, *contents(state, layout, fill)


def contents(state: ParallelState, layout: Layout, fill: bool) -> tuple[Stage, list[OptimizerPiece]]:
    stage = Stage(metas(layout.pp)[state.pp.rank], state, layout.dtype, fill)
    return stage, pieces_of(stage, state, layout, fill)


def save_at(rank: int, world_size: int, layout: Layout, root: Path) -> None:
    state, stage, pieces = parts(layout, fill=True)
    tensors = model_state([stage], state) | optimizer_state(pieces, state, data_sharded=layout.zero)
    save(root / layout.name, 7, tensors, {"layout": layout.name}, state.world)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layouts")
    for layout in LAYOUTS:
        run_world(layout.world_size, save_at, layout, root)
    return root


def test_each_element_is_written_once(saved: Path) -> None:
    every = {meta.name: meta for stage in metas(3).values() for meta in stage}
    for layout in LAYOUTS:
        folder = candidates(saved / layout.name).folders[0]
        kinds = ["exp_avg", "exp_avg_sq"] + (["main_param"] if layout.dtype == torch.bfloat16 else [])
        keys = [f"model.{name}" for name in every] + [optimizer_key(kind, name) for kind in kinds for name in every]
        tensors = Checkpoint(folder).tensors
        assert sorted(tensors) == sorted(keys)
        payload = sum(info.nbytes for info in tensors.values())
        assert payload == sum(
            prod(every[key.split(".", 1 if key.startswith("model.") else 2)[-1]].global_shape)
            * (layout.dtype.itemsize if key.startswith("model.") else 4)
            for key in keys
        )


def save_model_only(rank: int, world_size: int, layout: Layout, root: Path) -> None:
    state, stage, _ = parts(layout, fill=True)
    save(root, 1, model_state([stage], state), {}, state.world)


def load_weights_alone(rank: int, world_size: int, layout: Layout, root: Path) -> None:
    state, stage, pieces = parts(layout, fill=False)
    checkpoint = Checkpoint(candidates(root).folders[0])
    targets = load_targets([stage], pieces, state, checkpoint.tensors, load_optimizer=False)
    checkpoint.load(targets, state.world)
    for piece in pieces:
        if piece.key == "main_param":  # exactly the parameter, which was all there was
            param = next(param for param in stage.weights if param.meta is piece.meta)
            assert torch.equal(piece.data, param.detach().reshape(-1)[piece.start : piece.stop].float())
        else:
            assert piece.data.isnan().all()


def test_weights_alone_fill_main_parameters_too(tmp_path: Path) -> None:
    run_world(2, save_model_only, Layout(tp=2, dtype=torch.bfloat16), tmp_path)
    run_world(4, load_weights_alone, Layout(tp=2, dp=2, dtype=torch.bfloat16), tmp_path)


def test_without_a_process_group(saved: Path) -> None:
    for name in ("tp2-pp1-dp3-zero-float32", "tp2-pp1-dp2-zero-bfloat16"):
        stage = Stage(metas(1)[0], ParallelState(), torch.float32, fill=False)
        checkpoint = Checkpoint(candidates(saved / name).folders[0])
        targets = load_targets([stage], [], ParallelState(), checkpoint.tensors, load_optimizer=False)
        checkpoint.load(targets, Axis(), ignore=lambda key: key.startswith("optimizer."))
        dtype = torch.bfloat16 if "bfloat16" in name else torch.float32
        expected = Stage(metas(1)[0], ParallelState(), dtype, fill=True)
        assert all(torch.equal(a, b.float()) for a, b in zip(stage.weights, expected.weights, strict=True))


def misfit(rank: int, world_size: int, root: Path) -> str:
    """One rank wants a key that is not there, another wants another shape; all are told of both."""
    state = initialize_model_parallel()
    name = f"of_rank_{rank}" if rank == 0 else "b"
    module = Stage([ParamMeta(name, (3,))], state, torch.float32, fill=True)
    checkpoint = Checkpoint(candidates(root).folders[0])
    with pytest.raises(ValueError, match="does not fit") as error:
        checkpoint.load(model_state([module], state), state.world)
    return str(error.value)


def test_missing_extra_and_misshapen_keys_are_named_on_every_rank(tmp_path: Path) -> None:
    module = Stage([ParamMeta("a", (2,)), ParamMeta("b", (2,))], ParallelState(), torch.float32, fill=True)
    save(tmp_path, 1, model_state([module], ParallelState()), {}, Axis())
    messages = run_world(2, misfit, tmp_path)
    assert messages[0] == messages[1]
    assert "1 missing from the checkpoint: model.of_rank_0" in messages[0]
    assert "1 in the checkpoint but not in the run: model.a" in messages[0]
    assert "model.b (2,) in the checkpoint, (3,) in the run" in messages[0]


KILLED = {
    "before the rename": ("rename", ".tmp", 2, 1),
    "between rename and latest": ("replace", "txt.tmp", 2, 1),
    "while one of the same number is replaced": ("rename", ".tmp", 1, 1),
}


def save_and_die(rank: int, world_size: int, root: Path, method: str, suffix: str, iteration: int) -> None:
    original = getattr(Path, method)

    def dies(self: Path, target: Path) -> Path:
        if self.name.endswith(suffix) and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, target)

    setattr(Path, method, dies)
    state, stage, _ = parts(Layout(dp=2), fill=True)
    save(root, iteration, model_state([stage], state), {"from": "the killed"}, state.world)


@pytest.mark.parametrize(("method", "suffix", "iteration", "left"), KILLED.values(), ids=KILLED.keys())
def test_a_killed_save_leaves_the_latest_loadable(
    tmp_path: Path, method: str, suffix: str, iteration: int, left: int
) -> None:
    run_world(2, save_model_only, Layout(dp=2), tmp_path)
    with pytest.raises(RuntimeError):
        run_world(2, save_and_die, tmp_path, method, suffix, iteration)
    assert read_latest(tmp_path) == left
    folder = candidates(tmp_path).folders[0]
    assert json.loads((folder / "metadata.json").read_text()) == {}
    run_world(1, load_weights_alone, Layout(), tmp_path)
    run_world(2, save_model_only, Layout(dp=2), tmp_path)  # and what was left is cleared away
    assert not [path.name for path in tmp_path.iterdir() if path.suffix in (".tmp", ".old")]


def fail_to_write(rank: int, world_size: int, root: Path) -> str:
    state, stage, _ = parts(Layout(dp=2), fill=True)
    original = storage.dcp.FileSystemWriter.write_data

    def full(self, *args):
        if rank == 1:
            raise OSError(28, "No space left on device")
        return original(self, *args)

    storage.dcp.FileSystemWriter.write_data = full
    with pytest.raises(CheckpointError) as error:
        save(root, 2, model_state([stage], state), {}, state.world)
    return str(error.value)


def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    run_world(2, save_model_only, Layout(dp=2), tmp_path)
    messages = run_world(2, fail_to_write, tmp_path)
    assert all("on rank 1" in message and "No space left" in message for message in messages)
    assert read_latest(tmp_path) == 1 and not list(tmp_path.glob("*.tmp"))


def save_below_a_file(rank: int, world_size: int, root: Path) -> str:
    state, stage, _ = parts(Layout(dp=2), fill=True)
    with pytest.raises(CheckpointError) as error:
        save(root, 2, model_state([stage], state), {}, state.world)
    return str(error.value)


def test_an_impossible_folder_is_an_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    messages = run_world(2, save_below_a_file, tmp_path / "file")
    assert all("file" in message for message in messages)


def initialize_repeatedly(rank: int, world_size: int) -> int:
    return sum(initialize_model_parallel(1, world_size).pp.size for _ in range(4))


def test_groups_can_be_built_again() -> None:
    """As when a process loads a second model; ranks between the pipeline's ends are in fewer groups."""
    assert run_world(3, initialize_repeatedly) == [12, 12, 12]
