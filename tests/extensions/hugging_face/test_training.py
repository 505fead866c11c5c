"""Test that twenty steps of a run that starts from a Hugging Face folder equal twenty steps of transformers with
torch's AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # torch.optim needs it
import torch.nn.functional as F

from megatron.testing.local_run import local_run
from megatron.testing.local_world import run_world
from megatron.training import setup, train_step
from megatron.training.config.arguments import command_line
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve_legal
from tests.extensions.hugging_face.hf_exact import fp64, random_model, weights
from tests.extensions.hugging_face.hf_models import CASES
from tests.extensions.hugging_face.whole_models import to_hf

STEPS, LR, DECAY, CLIP = 20, 3e-3, 0.1, 0.5
FLAGS = f"""--cpu --fp64 --mock-data --seq-length 16 --micro-batch-size 2 --global-batch-size 4 --num-workers 0
    --train-iters {STEPS} --lr {LR} --lr-decay-style constant --weight-decay {DECAY} --clip-grad {CLIP}
    --adam-beta1 0.8 --adam-beta2 0.95 --adam-eps 1e-6"""


def train_both(rank: int, world_size: int, theirs: Any, config: RunConfig) -> list[float]:
    """Train both models. Assert that losses and gradient norms are equal in each step, and that all weights are equal
    after the last step."""
    groups = [
        {"params": [p for p in theirs.parameters() if (p.ndim > 1) is decays], "weight_decay": DECAY * decays}
        for decays in (True, False)
    ]
    optimizer, losses = torch.optim.AdamW(groups, lr=LR, betas=(0.8, 0.95), eps=1e-6), list[float]()
    with local_run(config, rank, world_size) as run:
        batches = list[Any]()
        (stage,) = run.stages.values()
        stage.register_forward_pre_hook(lambda _, args: batches.append(args[1]))
        for _ in range(STEPS):
            batches.clear()
            train_step.train_step(run)
            tokens, labels = (torch.cat([getattr(b, name) for b in batches]) for name in ("tokens", "labels"))
            with fp64():
                loss = F.cross_entropy(theirs(tokens, use_cache=False).logits.flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), CLIP)
            optimizer.step()
            total, count = run.interval.losses[-1].tolist()
            assert total / count == pytest.approx(loss.item(), rel=1e-9)
            assert run.interval.results[-1].grad_norm == pytest.approx(norm.item(), rel=1e-9)
            losses.append(loss.item())
        ours = to_hf({p.meta.name: p.detach() for p in stage.parameters()}, config.model, theirs.config.model_type)  # type: ignore[attr-defined]
    expected = weights(theirs)
    assert ours.keys() == expected.keys()
    for name, weight in expected.items():
        assert (ours[name] - weight).norm() < 1e-9 * weight.norm(), name
    return losses


@pytest.mark.parametrize("case", [case for case in ("llama3", "granite4-dense", "mixtral") if case in CASES])
def test_training_matches_transformers(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases are a dense model, a hybrid model with Mamba-2, and a mixture of experts without a balancing loss. Both
    programs use fp64 where they normally use fp32, such as for rotary angles."""
    monkeypatch.setattr(setup, "build_stages", fp64()(setup.build_stages))
    monkeypatch.setattr(train_step.TrainStep, "gradients", fp64()(train_step.TrainStep.gradients))
    with fp64():
        theirs = random_model(case)
    theirs.save_pretrained(tmp_path)
    experts = "--moe-router-load-balancing-type none" if case == "mixtral" else ""
    config = resolve_legal(command_line([*FLAGS.split(), *experts.split(), "--load", str(tmp_path)]).config, 1)
    (losses,) = run_world(1, train_both, theirs, config)
    assert losses[-1] < losses[0]
