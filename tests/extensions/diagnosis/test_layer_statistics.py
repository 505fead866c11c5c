"""Test that layer statistics (--log-layer-stats) match values that are computed directly in one process, and are equal
under every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.moe.router import TopKRouter
from megatron.extensions.observe.diagnosis.layer_stats.statistics import LayerStatistics
from megatron.training.hooks import Meter
from megatron.training.metrics.summary import summarize
from megatron.training.progress import Interval
from megatron.training.run import TrainingRun
from megatron.training.train_step import train_step
from tests.harness import run_world, running
from tests.tiny import TINY

MODEL = f"{TINY} --num-layers 4 --vocab-size 90 --make-vocab-size-divisible-by 4 --fp64 --log-layer-stats 1 "
MODEL += "--attention-dropout 0 --hidden-dropout 0 "
EXPERTS = MODEL + "--num-experts 4 --moe-aux-loss-coeff 0.01 --disable-bias-linear --mtp-num-layers 1 "
UNFUSED = MODEL + "--attention-backend unfused --optimizer sgd "


def recorded(rank: int, world_size: int, flags: str, steps: int = 2) -> list[dict[str, Any]]:
    """Train for `steps` steps, and return the metric record of each step."""
    with running(flags.split(), rank, world_size) as run:
        for _ in range(steps):
            train_step(run)
        summarize(run)
        return [record.as_json() for record in statistics_of(run).found]


def statistics_of(run: TrainingRun) -> LayerStatistics:
    (found,) = (meter for meter in run.meters if isinstance(meter, LayerStatistics))
    return found


def flat(record: dict[str, Any]) -> dict[str, float]:
    """Return all statistics of layers and parameters, keyed by name. Norms per tensor-parallel rank are left out,
    because a one-process run has none."""
    layers = record["layers"]
    found = {}
    for name, values in layers.items():
        for number, value in zip(layers["layer"], values, strict=True):
            for place, each in enumerate(value if isinstance(value, list) else [value]):
                if each is not None:
                    found[f"{name} {number} {place}"] = each
    return found | {f"{n} {q}": x for n, norms in record["parameters"].items() for q, x in norms.items()}


OF_EXPERTS = "--ep 2 --tp 2 --sequence-parallel --expert-tensor-parallel-size 1"
LAYOUTS = {
    MODEL: {
        "--tp 2 --sequence-parallel --pp 2 --num-layers-per-virtual-pipeline-stage 1": 4,
        "--tp 2 --data-parallel-sharding-strategy optim_grads_params --recompute-granularity full": 4,
        "--cp 2 --no-use-distributed-optimizer": 2,
    },
    EXPERTS: {OF_EXPERTS: 4, "--pp 2 --micro-batch-size 2": 2},
    UNFUSED: {"--tp 2 --cp 2 --cp-comm-type a2a": 4, "--data-parallel-sharding-strategy optim_grads": 2},
}
"""Layouts under which each model is tested, with the number of ranks of each layout."""


@pytest.mark.parametrize(("flags", "layouts"), LAYOUTS.items(), ids=["dense", "experts", "unfused"])
def test_every_layout_records_the_same_as_one_process(flags: str, layouts: dict[str, int]) -> None:
    alone = [flat(record) for record in run_world(1, recorded, flags)[0]]
    assert len(alone) == 2
    for layout, size in layouts.items():
        for found in run_world(size, recorded, flags + layout):
            for step, one in zip(found, alone, strict=True):
                assert flat(step) == pytest.approx(one, rel=1e-9, abs=1e-14), layout


def losses(rank: int, world_size: int, flags: str) -> list[float]:
    with running(flags.split(), rank, world_size) as run:
        interval = run.interval = Interval()
        for _ in range(3):
            train_step(run)
        return [loss[0].item() for loss in interval.losses]


def test_statistics_do_not_change_the_run() -> None:
    for flags in (EXPERTS, UNFUSED):
        assert run_world(1, losses, flags) == run_world(1, losses, flags.replace("--log-layer-stats 1", ""))


def counted(rank: int, world_size: int, flags: str) -> tuple[dict[str, float], dict[str, float], set[str]]:
    """Return the logged record of a step, the values computed directly with hooks, and the names of the layer
    statistics."""
    plain: dict[str, float] = {}
    outputs: dict[str, list[torch.Tensor]] = {}
    choices: dict[int, list[torch.Tensor]] = {}

    def keep(name: str, of: nn.Module) -> None:
        of.register_forward_hook(lambda module, args, out: outputs.setdefault(name, []).append(out.detach()))

    with running(flags.split(), rank, world_size) as run:
        (model,) = run.stages.values()
        for number, layer in enumerate(model.decoder.layers):
            for name, module in (("", layer), ("attention_", layer.self_attention), ("mlp_", layer.mlp)):
                keep(f"{name}output_rms {number} 0", module)
            for router in layer.modules():
                if isinstance(router, TopKRouter):
                    chosen = choices.setdefault(number, [])
                    router.register_forward_hook(lambda module, args, out, to=chosen: to.append(out.experts.flatten()))
        before = {name: p.detach().clone() for name, (p, _) in model.named_metas().items()}

        class Look(Meter):
            def gradients_ready(self, factor: torch.Tensor) -> None:
                for name, (parameter, _) in model.named_metas().items():
                    plain[f"{name} grad_norm"] = (parameter.main_grad * factor).norm().item()

        run.meters.append(Look())
        train_step(run)
        summarize(run)
        for name, (parameter, _) in model.named_metas().items():
            plain[f"{name} weight_norm"] = parameter.norm().item()
            plain[f"{name} update_norm"] = (parameter - before[name]).norm().item()
    for name, found in outputs.items():
        plain[name] = torch.cat([x.flatten() for x in found]).square().mean().sqrt().item()
    for number, chosen in choices.items():
        counts = torch.cat(chosen).bincount(minlength=4).double()
        plain |= {f"expert_load {number} {expert}": load.item() for expert, load in enumerate(counts / counts.mean())}
    (record,) = (each.as_json() for each in statistics_of(run).found)
    return flat(record), plain, set(record["layers"])


def test_logged_values_match_direct_counts() -> None:
    """In one process, the logged values equal values that are computed with hooks and from the parameters. The
    gradients are measured before clipping."""
    common = {"layer", "output_rms", "output_gain", "attention_output_rms", "mlp_output_rms"}
    common |= {"weight_norm", "grad_norm", "update_norm"}
    for flags, more in (
        (UNFUSED + "--micro-batch-size 2 --clip-grad 0.01", {"attention_logit_max"}),
        (EXPERTS + "--mtp-num-layers 0", {"attention_logit_bound", "router_entropy", "expert_load"}),
    ):
        ((found, plain, statistics),) = run_world(1, counted, flags)
        assert statistics == common | more
        assert {name: found[name] for name in plain} == pytest.approx(plain, rel=1e-12)
        entropies = [value for name, value in found.items() if name.startswith("router_entropy")]
        assert all(1.0 < entropy <= 1.3863 for entropy in entropies)  # with four experts, the entropy is at most log 4
