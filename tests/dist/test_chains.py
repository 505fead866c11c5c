"""Tests of optimizers that are chains of transforms. The updates under every layout equal the updates in one process.
The states have the planned size and can be loaded under a different layout."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megatron.core.config.optimizers import OPTIMIZERS
from megatron.core.dist_checkpointing.state_dict import load_targets, model_state, optimizer_key, optimizer_state
from megatron.core.dist_checkpointing.storage import Checkpoint, save
from megatron.core.optimizer.distrib_optimizer import Update
from megatron.core.optimizer.optimizer import Rates
from megatron.core.optimizer.planned_states import matrix_size
from megatron.core.optimizer.transforms import AverageWeights, Transform, elements, of_matrices, reduced
from megatron.core.parallel_dims import ParallelDims
from megatron.core.parallel_state import build_parallel_state
from megatron.core.param_meta import ParamMeta
from megatron.training.extensions import load_extensions
from tests.dist.toy import DECAY, LR, Oracle, build, run_step
from tests.extensions import needs
from tests.forked import ROOT
from tests.harness import run_world
from tests.rules import problems

EXAMPLES = ["adafactor", "shampoo", "averaged_adam"]


@pytest.fixture(scope="module", autouse=True)
def extensions() -> None:
    load_extensions([str(ROOT / "examples" / f"{name}.py") for name in EXAMPLES])
    OPTIMIZERS.register("count", lambda config, meta: [Count()])


LAYOUTS = ParallelDims(dp=3), ParallelDims(tp=2, dp=2, ep=2, expt_tp=2), ParallelDims(tp=2, pp=2)


class OfMatrices(torch.optim.Optimizer):
    """Optimizer for unsharded tensors that passes views of its parameters to the optimizer that `make` returns. For
    stacked matrices, the shape of the view is [stack, rows, columns]."""

    def __init__(self, groups, metas, make) -> None:
        super().__init__(groups, {})
        params = [param for group in self.param_groups for param in group["params"]]
        self.seen = {param: nn.Parameter(param.detach().view(shape_of(param, metas))) for param in params}
        own = [{"params": [self.seen[param] for param in group["params"]]} for group in self.param_groups]
        self.optimizer = make(own)

    def step(self) -> None:  # type: ignore[override]
        for param, seen in self.seen.items():
            seen.grad = param.grad.view(seen.shape)
        for group, own in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            own["weight_decay"] = group["weight_decay"]
        self.optimizer.step()


def shape_of(param: Tensor, metas: dict[int, ParamMeta]) -> tuple[int, ...]:
    meta = metas[id(param)]
    return (*meta.global_shape[: meta.stacked], *matrix_size(meta)) if meta.matrix else meta.global_shape


class WholeShampoo(torch.optim.Optimizer):
    """Implementation of Shampoo that computes matrix roots by SVD. The tensors [..., rows, columns] are unsharded."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state, grad = self.state[param], param.grad
                for name, square in ("left", grad @ grad.mT), ("right", grad.mT @ grad):
                    state[name] = state.get(name, 0) + square
                moved = root_of(state["left"]) @ grad @ root_of(state["right"])
                state["momentum"] = 0.9 * state.get("momentum", 0) + moved
                with torch.no_grad():
                    param.mul_(1 - LR * group["weight_decay"]).sub_(LR * state["momentum"])


def root_of(x: Tensor) -> Tensor:
    left, values, _ = torch.linalg.svd(x)
    return (left * (values + 1e-6).pow(-0.25).unsqueeze(-2)) @ left.mT


def oracle_of(state, kind: str) -> Oracle:
    """Return the reference optimizer. For Shampoo, torch's AdamW updates all parameters that are not matrices."""
    oracle = Oracle(state, lambda groups: torch.optim.SGD(groups, lr=LR))
    metas = {id(param): oracle.metas[name] for name, param in oracle.params.items()}
    groups = [{"params": group["params"]} for group in oracle.optimizer.param_groups]
    if kind == "adafactor":
        oracle.optimizer = OfMatrices(groups, metas, lambda own: torch.optim.Adafactor(own, lr=LR))
    elif kind == "averaged_adam":
        oracle.optimizer = torch.optim.AdamW(groups, lr=LR)
    else:
        oracle.optimizer = Both(groups, metas)
    return oracle


class Both(torch.optim.Optimizer):
    """Optimizer that applies Shampoo to hidden matrices and AdamW to all other parameters."""

    def __init__(self, groups, metas) -> None:
        super().__init__(groups, {})
        hidden = [
            [p for p in group["params"] if metas[id(p)].matrix and metas[id(p)].role != "embedding"] for group in groups
        ]
        others = [
            [p for p in group["params"] if all(p is not q for q in own)]
            for group, own in zip(groups, hidden, strict=True)
        ]
        shampoo = OfMatrices([{"params": hidden[0]}], metas, lambda own: WholeShampoo(own, {}))
        self.parts = shampoo, torch.optim.AdamW([{"params": each} for each in others], lr=LR)
        assert not hidden[1]

    def step(self) -> None:  # type: ignore[override]
        for part in self.parts:
            for group, own in zip(self.param_groups, part.param_groups, strict=False):
                own["weight_decay"] = group["weight_decay"]
            part.step()


def compare_with_one_process(rank, world, dims, distributed, kind):
    state = build_parallel_state(dims, rank)
    flags = {"average_decay": 0.9} if kind == "averaged_adam" else {}
    ddp, optimizer = build(state, distributed, optimizer=kind, clip_grad=0.5, **flags)
    oracle, averages = oracle_of(state, kind), {}
    for step in range(3):
        _, tokens = run_step(ddp, optimizer, state, step)
        oracle.step(step, tokens, 0.5, DECAY)
        for name, param in oracle.params.items():
            averages[name] = torch.lerp(param.detach(), averages[name], 0.9) if step else param.detach().clone()
        for param in ddp.params:
            torch.testing.assert_close(param.detach(), oracle.local(param.meta.name), rtol=1e-9, atol=1e-11)
    for piece in optimizer.sharded_state():
        if piece.key == "averaged":
            oracle.params[piece.meta.name] = averages[piece.meta.name]
            expected = oracle.local(piece.meta.name).flatten()[piece.start : piece.stop]
            torch.testing.assert_close(piece.data, expected, rtol=1e-9, atol=1e-11)
    (chain,) = optimizer.chains
    assert chain.nbytes == chain.plan.bytes_by_place(8)[chain.plan.ranks.index(rank)]
    fused = {piece.key for piece in optimizer.sharded_state()} & {"exp_avg"} if kind == "averaged_adam" else set()
    in_shards = sum(shard.nbytes[1] for shard in optimizer.shards)
    assert optimizer.nbytes[0] == chain.nbytes + in_shards and bool(fused) is (in_shards > 0)


@pytest.mark.parametrize("distributed", [True, False], ids=["zero1", "replicated"])
@pytest.mark.parametrize("kind", EXAMPLES)
@pytest.mark.parametrize("dims", LAYOUTS, ids=str)
def test_updates_match_one_process(dims, kind, distributed):
    """Under every layout, the updates equal those of the reference optimizer in one process. The states on each rank
    have the planned size in bytes."""
    run_world(dims.world_size, compare_with_one_process, dims, distributed, kind)


@pytest.mark.parametrize("kind", ["averaged_adam"])
def test_each_optimizer_instance_updates_its_own_elements(kind):
    run_world(4, compare_with_one_process, ParallelDims(dp=4, instances=2), True, kind)


def skipped_step(rank, world, kind):
    state = build_parallel_state(ParallelDims(dp=world), rank)
    ddp, optimizer = build(state, optimizer=kind)
    run_step(ddp, optimizer, state, 0)
    before = [piece.data.clone() for piece in optimizer.sharded_state()]
    params = [param.detach().clone() for param in ddp.params]
    for param in ddp.params if rank == world - 1 else ():
        param.main_grad.fill_(math.nan)
    assert optimizer.step(Update(Rates(LR, DECAY))).skipped
    assert all(torch.equal(a, b.data) for a, b in zip(before, optimizer.sharded_state(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(params, ddp.params, strict=True))
    assert optimizer.step_count == 1


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_skipped_step_changes_no_state(kind):
    run_world(2, skipped_step, kind)


class Count(Transform):
    """Transform whose states cover all kinds (per element, reduced, and per matrix) and several dtypes. Each element of
    a state is the number of updates so far."""

    def states(self, meta):
        found = [elements("ones", meta, "bfloat16"), reduced("one", meta, dtype="float32")]
        return [*found, of_matrices("each", meta)] if meta.matrix else found

    def update(self, x):
        x.states["ones"] += 1
        total = yield from x.fold("one", x.param * 0 + 1, lambda old, new: old + new)
        assert total.numel() == 1

        def count(matrix, states):
            states["each"] += 1
            return matrix

        if x.meta.matrix:
            x.update = yield from x.whole(x.update, count)
        x.update = x.update * 0


def train_and_save(rank, world, dims, distributed, kind, folder):
    state = build_parallel_state(dims, rank)
    ddp, optimizer = build(state, distributed, dtype="bf16" if kind == "count" else "fp64", optimizer=kind)
    for step in range(2):
        run_step(ddp, optimizer, state, step)
    tensors = model_state(ddp.modules, state) | optimizer_state(optimizer.sharded_state(), state, distributed)
    save(folder, 1, tensors, {}, state.world)


def load_and_compare(rank, world, dims, distributed, kind, folder):
    state = build_parallel_state(dims, rank)
    ddp, optimizer = build(state, distributed, dtype="bf16" if kind == "count" else "fp64", optimizer=kind)
    checkpoint = Checkpoint(folder / "iter_0000001")
    with optimizer.loading_state() as pieces:
        targets = load_targets(ddp.modules, pieces, state, checkpoint.tensors, load_optimizer=True)
        checkpoint.load(targets, state.world, ignore=lambda key: key.startswith("model."))
    for piece in optimizer.sharded_state():
        saved = checkpoint.read(optimizer_key(piece.key, piece.meta.name))
        assert tuple(saved.shape) == piece.global_shape and saved.abs().max() > 0
        for offset, values in piece.boxes(state.coords):
            place = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
            assert torch.equal(values, saved[place])
    return {(piece.key, piece.meta.name): piece.data.dtype for piece in optimizer.sharded_state()}


@pytest.mark.parametrize("kind", ["adafactor", "shampoo", "count"])
def test_states_of_every_shape_reshard(kind, tmp_path: Path):
    """States that are saved under one layout and loaded under another layout are bit-identical."""
    run_world(4, train_and_save, ParallelDims(tp=2, dp=2, ep=2), True, kind, tmp_path)
    checkpoint = Checkpoint(tmp_path / "iter_0000001")
    if kind == "count":
        counted = [checkpoint.read(key) for key in checkpoint.tensors if ".ones." in key or ".each." in key]
        assert counted and all((values == 2).all() for values in counted)
        experts = optimizer_key("each", "decoder.layers.0.experts.linear_fc1.weight")
        assert checkpoint.tensors[experts].shape == (4,)
    for dims, distributed in (ParallelDims(), True), (ParallelDims(pp=2, dp=2), True), (ParallelDims(dp=3), False):
        run_world(dims.world_size, load_and_compare, dims, distributed, kind, tmp_path)


class Misspelled(Transform):
    def updated(self, x):
        pass


def test_unusable_links_are_refused():
    state = build_parallel_state(ParallelDims(), 0)
    OPTIMIZERS.register("misspelled", lambda config, meta: [Misspelled()])
    with pytest.raises(ValueError, match=r"--optimizer misspelled: its link Misspelled has no update\(x\); write it"):
        build(state, optimizer="misspelled")
    OPTIMIZERS.register("not_by_element", lambda config, meta: [Count()], by_element=True)
    with pytest.raises(ValueError, match="by_element=True, and Count makes requests"):
        build(state, optimizer="not_by_element")


class Named(Transform):
    def states(self, meta):
        return [elements("twice", meta), elements("twice", meta, "int3"), elements("main_param", meta)]

    def update(self, x):
        pass


def test_all_invalid_states_are_named_at_once():
    OPTIMIZERS.register("named", lambda config, meta: [Named(), AverageWeights(0.5)])
    with pytest.raises(ValueError, match="two states are named twice") as error:
        build(build_parallel_state(ParallelDims(), 0), optimizer="named")
    assert all(words in str(error.value) for words in ("dtype int3", "other than main_param"))
    with pytest.raises(ValueError, match=r"must accept \(config, meta\), but accepts \(config\)"):
        OPTIMIZERS.register("without_meta", lambda config: [])


REFUSED = [
    pytest.param("--num-distributed-optimizer-instances 2", "ranks of all instances update matrices", id="instances"),
    needs("offload", "--optimizer-cpu-offload", "--optimizer adafactor needs whole parameters"),
    needs("pipedream_2bw", "--pp 2 --pipeline-schedule 2bw", "2bw: cannot be combined with --optimizer adafactor"),
]


@pytest.mark.parametrize(("flags", "told"), REFUSED)
def test_options_that_no_chain_supports_are_refused(flags, told):
    found = problems(f"--optimizer adafactor --global-batch-size 8 {flags}", 4)
    assert any(told in problem for problem in found), found
