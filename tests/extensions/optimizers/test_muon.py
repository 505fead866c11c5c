"""Under every layout, Muon makes the same updates as torch.optim.Muon in one process. Adam updates the parameters that
Muon does not update."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._dynamo  # torch.optim imports this module lazily: import it once here instead of in every forked rank
from torch import Tensor

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.models.gpt.gpt_model import GPTModel, WeightSetup
from megatron.core.optimizer import matrix_plan
from megatron.core.parallel_dims import ParallelDims
from megatron.core.parallel_state import build_parallel_state
from megatron.extensions.optim.optimizers.flags import MuonFlags
from megatron.extensions.optim.optimizers.muon import newton_schulz, scale
from megatron.extensions.optim.optimizers.newton_schulz import COEFFICIENTS, coefficients
from megatron.training.progress import Progress
from tests.dist.test_optimizer import LAYOUTS
from tests.dist.toy import DECAY, LR, Oracle, build, run_step
from tests.extensions.linear_attention import test_gated_delta_net as delta
from tests.gpt_cases import model_of
from tests.harness import run_world
from tests.pure.test_checkpointing import Run
from tests.pure.test_checkpointing import config as run_of

MOONLIGHT = {"muon_extra_scale_factor": 0.2, "muon_momentum": 0.95}
JORDAN = {"muon_scale_mode": "shape_scaling", "muon_nesterov": True, "muon_momentum": 0.8, "muon_num_ns_steps": 3}
FLAGS = {"optimizer": "muon", "muon_coefficient_type": "simple", "clip_grad": 0.5}
ADAM = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-6}


class MuonOracle(Oracle):
    """Reference optimizer: torch.optim.Muon for the matrices in each hidden parameter, and AdamW for all other
    parameters."""

    def __init__(self, state, flags, dtype=torch.float64):
        super().__init__(state, lambda groups: None, dtype)
        self.boxes = {}
        for name, meta in self.metas.items():
            if meta.role != "embedding" and meta.matrix:
                for offset, shape in matrix_plan.linear_maps(meta):
                    cuts = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
                    matrix = self.params[name][cuts].detach().reshape(-1, shape[-1]).clone().requires_grad_()
                    self.boxes[matrix] = name, cuts
        hidden = {name for name, _ in self.boxes.values()}
        others = [
            {"params": [p for n, p in self.params.items() if n not in hidden and self.metas[n].matrix is decays]}
            for decays in (True, False)
        ]
        moonlight = "muon_scale_mode" not in flags
        self.muon = torch.optim.Muon(
            list(self.boxes),
            lr=LR,
            weight_decay=DECAY,
            momentum=flags["muon_momentum"],
            nesterov=flags.get("muon_nesterov", False),
            ns_steps=flags.get("muon_num_ns_steps", 5),
            adjust_lr_fn="match_rms_adamw" if moonlight else "original",
        )
        self.optimizer = torch.optim.AdamW(others, lr=LR, betas=(0.8, 0.95), eps=1e-6)
        self.optimizer.register_step_post_hook(lambda *_: self.step_matrices())

    @torch.no_grad()
    def step_matrices(self):
        for matrix, (name, cuts) in self.boxes.items():
            matrix.grad = self.params[name].grad[cuts].reshape(matrix.shape)
        self.muon.step()
        for matrix, (name, cuts) in self.boxes.items():
            place = self.params[name][cuts]
            place.copy_(matrix.view(place.shape))


def compare(rank, world, dims, distributed, flags, round_size=matrix_plan.ROUND, dtype="fp64"):
    matrix_plan.ROUND = round_size
    exact = dtype == "fp64"
    if exact:  # make torch's Newton-Schulz iteration use fp64 instead of bf16 as well
        torch.Tensor.bfloat16 = torch.Tensor.clone
    state = build_parallel_state(dims, rank)
    ddp, optimizer = build(state, distributed, dtype, **FLAGS, **ADAM, **flags)
    oracle = MuonOracle(state, flags, torch.float64 if exact else torch.float32)
    room = {"rtol": 1e-11, "atol": 1e-11} if exact else {"rtol": 0, "atol": 0.02 * LR}
    for step in range(3 if exact else 2):
        result, tokens = run_step(ddp, optimizer, state, step)
        assert result.grad_norm == pytest.approx(oracle.step(step, tokens, 0.5, DECAY), rel=1e-13 if exact else 1e-6)
        for param in ddp.params:
            torch.testing.assert_close(param.detach(), oracle.local(param.meta.name), **room, msg=param.meta.name)
    kinds = {}
    for piece in optimizer.sharded_state():
        kinds.setdefault(piece.meta.role == "embedding" or not piece.meta.matrix, set()).add(piece.key)
    return kinds


CASES = [
    *((dims, distributed, MOONLIGHT) for dims in LAYOUTS for distributed in (True, False)),
    (ParallelDims(tp=2, dp=2), True, JORDAN),
    # With one matrix per communication round, the messages of two rounds are in flight at the same time.
    *((dims, True, MOONLIGHT, 1) for dims in (ParallelDims(), ParallelDims(tp=2, dp=2, ep=2, expt_tp=2))),
    # Main parameters are fp32, and the Newton-Schulz iteration runs in bf16, as it always does in torch.optim.Muon.
    (ParallelDims(dp=2), True, MOONLIGHT, matrix_plan.ROUND, "fp32"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_muon_equals_one_process(case):
    ranks = run_world(case[0].world_size, compare, *case)
    assert {key for kinds in ranks for key in kinds.get(False, ())} == {"momentum_buffer"}
    assert {key for kinds in ranks for key in kinds.get(True, ())} == {"exp_avg", "exp_avg_sq"}


def step_of(rank, world, dims, flags):
    state = build_parallel_state(dims, rank)
    ddp, optimizer = build(state, **FLAGS | flags)
    before = {param.meta.name: param.detach().clone() for param in ddp.params}
    run_step(ddp, optimizer, state, 0)
    return {param.meta.name: (before[param.meta.name], param.detach().clone()) for param in ddp.params}


QKV, FC1 = "decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.0.mlp.linear_fc1.weight"
ROUTER = "decoder.layers.1.mlp.router.weight"


def orthonormal(update: Tensor) -> bool:
    """Return True if the rows or columns of an update are orthogonal and have equal norms. The tolerance allows for the
    error of five Newton-Schulz iterations."""
    matrix = update.reshape(-1, update.shape[-1])
    values = torch.linalg.svdvals(matrix)
    return bool(values.amax() < 1.35 * values.amin())


def update_of(step, name: str) -> Tensor:
    before, after = step[name]
    return (after - (1 - LR * DECAY) * before) / -LR


@pytest.mark.parametrize("split", [True, False])
def test_fused_weights_are_separate_matrices_or_one(split):
    flags = {"muon_split_qkv": split, "muon_split_gate_up": split, "muon_coefficient_type": "polar_express"}
    (step,) = run_world(1, step_of, ParallelDims(), flags | {"muon_num_ns_steps": 9})
    update = update_of(step, QKV)
    parts = [update[:, :3], update[:, 3:4], update[:, 4:]]
    assert orthonormal(update) is not split and all(map(orthonormal, parts)) is split
    update = update_of(step, FC1)
    assert orthonormal(update) is not split and all(map(orthonormal, update)) is split
    size = torch.linalg.matrix_norm((update if not split else update[0]).reshape(-1, 7), 2)
    torch.testing.assert_close(size.item(), (12 if not split else 7) ** 0.5, rtol=0.01, atol=0)


def test_blockwise_orthogonalizes_each_shard():
    flags = {"muon_tp_mode": "blockwise", "muon_coefficient_type": "polar_express", "muon_num_ns_steps": 9}
    dims = ParallelDims(tp=2, dp=2)
    ranks = run_world(4, step_of, dims, flags)
    whole = run_world(4, step_of, dims, flags | {"muon_tp_mode": "duplicated"})
    name = "decoder.layers.1.mlp.linear_fc2.weight"  # the shape is [31, 6], sharded by columns
    both = lambda ranks: torch.cat([update_of(step, name) for step in ranks[:2]], 1)  # noqa: E731
    assert all(orthonormal(update_of(step, name)) for step in ranks) and not orthonormal(both(ranks))
    assert orthonormal(both(whole))
    assert torch.equal(update_of(ranks[0], name), update_of(ranks[2], name)), "replicas must not differ"


def test_the_router_may_be_left_to_adam():
    (step,) = run_world(1, step_of, ParallelDims(), {"moe_router_skip_muon": True})
    assert update_of(step, ROUTER).abs().sub(1).abs().amax() < 1e-3  # Adam's first update is the gradient's sign
    (step,) = run_world(1, step_of, ParallelDims(), {"muon_scalar_optimizer": "sgd"})
    assert update_of(step, ROUTER).abs().sub(1).abs().amax() > 0.1


@pytest.mark.parametrize("kind", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(2, 5, 8), (1, 8, 5), (3, 6, 6)])
def test_singular_values_are_near_one(kind, shape):
    noise = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    u, _, v = torch.linalg.svd(noise, full_matrices=False)
    result = newton_schulz(u * torch.linspace(5, 0.2, min(shape[1:])) @ v, coefficients(kind, 5))
    values = torch.diagonal(u.mT @ result @ v.mT, dim1=-2, dim2=-1)
    assert values.amin() > 0.65 and values.amax() < 1.3
    torch.testing.assert_close(u * values.unsqueeze(-2) @ v, result, rtol=0, atol=1e-9)


def test_the_gradient_scale_does_not_matter():
    noise = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    steps = coefficients("quintic", 5)
    torch.testing.assert_close(newton_schulz(noise * 1e-12, steps), newton_schulz(noise, steps), rtol=0, atol=1e-9)


def test_a_matrix_without_gradient_does_not_change():
    assert not newton_schulz(torch.zeros(1, 3, 4), coefficients("quintic", 5)).any()


def test_scale_modes_multiply_the_update():
    assert scale(16, 4, "spectral") == scale(4, 16, "spectral") == 4
    assert (scale(16, 4, "unit_rms_norm"), scale(4, 16, "unit_rms_norm")) == (2, 0.5)
    assert (scale(16, 4, "shape_scaling"), scale(4, 16, "shape_scaling")) == (2, 1)


def test_both_configurations_must_agree():
    state = build_parallel_state(ParallelDims(), 0)
    ddp, optimizer = build(state)
    mismatch = r"whole_roles is \['gate', 'hidden', 'router'\] in OptimizerConfig and \[\] in"
    with pytest.raises(ValueError, match=mismatch):
        type(optimizer)(replace(optimizer.config, optimizer="muon"), ddp, state)


def test_another_optimizer_for_some_parameters_is_refused(tmp_path: Path) -> None:
    muon = run_of(tmp_path, optimizer=OptimizerConfig("muon", lr=1e-2))
    Run(muon).save(Progress(1, 8))
    assert Run(muon).load() == Progress(1, 8)
    other = muon.with_options(MuonFlags(muon_scalar_optimizer="sgd", moe_router_skip_muon=True))
    with pytest.raises(ValueError, match="-scalar-optimizer is adam in the checkpoint but sgd in the run") as error:
        Run(other).load()
    assert "--moe-router-skip-muon is False in the checkpoint but True in the run" in str(error.value)


def test_states_of_a_different_update_rule_are_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states in a checkpoint may belong to a different update rule. For example, an older version of this program
    used Muon for Mamba-2's packed projection."""
    muon = run_of(tmp_path, optimizer=OptimizerConfig("muon", lr=1e-2))
    Run(muon).save(Progress(1, 8))
    monkeypatch.setattr(OptimizerConfig, "whole_roles", property(lambda config: frozenset({"router"})))
    with pytest.raises(ValueError, match=r"missing from the checkpoint: optimizer.exp_avg.*: add --no-load-optim"):
        Run(muon).load()
    without = replace(muon, checkpoint=replace(muon.checkpoint, load_optim=False))
    assert Run(without).load() == Progress(1, 8)


def test_the_packed_projection_of_mamba2_is_left_to_the_scalar_optimizer() -> None:
    """As in Megatron-LM, Muon does not update the input projection. The rows of this projection compute gates, inputs,
    B, C and step sizes, so the projection consists of several matrices."""
    layer = GPTModel(model_of("mamba"), weights=WeightSetup("meta", initialize=False)).decoder.layers[0].self_attention
    metas = {p.meta.name.split("self_attention.")[1]: p.meta for p in layer.parameters() if p.meta.matrix}
    whole = OptimizerConfig("muon", lr=1e-2).whole_roles
    assert {name for name, meta in metas.items() if meta.role in whole} == {"out_proj.weight"}
    assert metas["in_proj.weight"].kind == "matrices"  # the projection has the same weight decay as other matrices


def test_delta_net_projections_are_matrices_and_convolutions_are_not() -> None:
    """Each channel of a convolution is a filter over tokens: it does not map one vector to another. The input
    projection is one matrix, as in Megatron-LM."""
    layer = GPTModel(delta.DELTA_NET, weights=WeightSetup("meta", initialize=False)).decoder.layers[0].self_attention
    metas = {p.meta.name.split("self_attention.")[1]: p.meta for p in layer.parameters() if p.meta.matrix}
    whole = OptimizerConfig("muon", lr=1e-2).whole_roles
    assert {name for name, meta in metas.items() if meta.role not in whole} == {"conv1d.weight"}
    assert len(list(matrix_plan.linear_maps(metas["in_proj.weight"]))) == 1
