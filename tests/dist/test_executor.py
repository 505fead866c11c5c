"""Real pipelines over gloo: losses and gradients equal those of one process, whatever the schedule."""

import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from megatron.core.parallel_dims import ParallelDims
from megatron.core.parallel_state import Axis, build_parallel_state
from megatron.core.pipeline_parallel.actions import Kind
from megatron.core.pipeline_parallel.executor import PipelineExecutor
from megatron.core.pipeline_parallel.p2p import PipelineP2P
from megatron.core.pipeline_parallel.passes import pipeline_lists
from megatron.core.pipeline_parallel.schedules import layout_of, splits_backward
from megatron.core.tensor_parallel.layers import LOCAL, LinearFunction
from megatron.core.tensor_parallel.weight_grad import WeightGradQueue
from tests.harness import run_world

HIDDEN = (3, 2, 5)
VOCABULARY = 7


@dataclass
class Batch:
    tokens: Tensor
    labels: Tensor


class Stage(nn.Module):
    """A piece of a toy model; a stage in the middle may have no layer at all.

    With a queue the weights have a `main_grad`, and what adds to them notes the action that was being run.
    """

    def __init__(self, stage: int, num_stages: int, queue: WeightGradQueue) -> None:
        super().__init__()
        torch.manual_seed(stage)
        width, empty = HIDDEN[-1], stage == 1 and num_stages > 2
        self.embedding = nn.Embedding(VOCABULARY, width) if stage == 0 else None
        self.layer = None if empty else nn.Linear(width, width)
        self.head = nn.Linear(width, VOCABULARY) if stage == num_stages - 1 else None
        self.queue = queue
        self.outputs: list[weakref.ref] = []
        self.double()

    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return LinearFunction.apply(x, layer.weight, layer.bias, LOCAL, Axis(), self.queue)

    def forward(self, hidden: Tensor | None, batch: Batch) -> Tensor:
        x = self.embedding(batch.tokens) if self.embedding else hidden
        x = x if self.layer is None else x + torch.tanh(self.linear(self.layer, x))
        if self.head is not None:
            logits = self.linear(self.head, x)
            return nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
        assert all(output() is None for output in self.outputs), "an output outlives its send"
        if self.layer is not None:
            self.outputs.append(weakref.ref(x))
        return x


def make_stages(numbers, num_stages: int, queue: WeightGradQueue) -> dict[int, nn.Module]:
    return {stage: Stage(stage, num_stages, queue) for stage in numbers}


def give_main_grads(stages) -> None:
    for stage in stages.values():
        for layer in (stage.layer, stage.head):
            if layer is not None:
                layer.weight.main_grad = torch.zeros_like(layer.weight)


def make_batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randint(VOCABULARY, HIDDEN[:2], generator=generator)  # noqa: E731
    return [Batch(draw(), draw()) for _ in range(count)]


def one_process(num_stages: int, m: int, seed: float):
    stages = make_stages(range(num_stages), num_stages, WeightGradQueue())
    losses = []
    for batch in make_batches(m):
        x = None
        for stage in range(num_stages):
            x = stages[stage](x, batch)
        losses.append(x.detach())
        (x * seed).backward()
        for stage in stages.values():
            stage.outputs.clear()
    return losses, grads_of(stages)


def grads_of(stages) -> dict[str, Tensor]:
    return {
        f"{number}.{name}": getattr(p, "main_grad", p.grad)
        for number, stage in stages.items()
        for name, p in stage.named_parameters()
    }


def run_pipeline(rank: int, world: int, schedule: str, m: int, v: int, seed: float, lanes: bool = False):
    state = build_parallel_state(ParallelDims(pp=world), rank, lanes=lanes)
    assert len({lane.group for lane in state.lanes}) == (4 if lanes else 1)
    layout, queue = layout_of(schedule, world, v), WeightGradQueue()
    stages = make_stages(layout.stages_of(rank), layout.num_stages, queue)
    ran: list = []
    p2p = PipelineP2P(state.pp, HIDDEN, torch.float64, torch.device("cpu"), lanes=state.lanes)
    executor = PipelineExecutor(stages, layout, p2p, queue)
    executor.after = ran.append
    evaluated = executor.run(pipeline_lists(schedule, world, m + 1, v, evaluate=True)[rank], make_batches(m + 1))
    assert all(grad is None for grad in grads_of(stages).values())
    ran.clear()
    give_main_grads(stages)
    added_in = note_who_adds(stages, executor)
    actions = pipeline_lists(schedule, world, m, v)[rank]
    losses = executor.run(actions, make_batches(m), loss_scale_seed=seed)
    assert ran == list(actions)
    assert added_in <= {Kind.W if splits_backward(schedule) else Kind.B}
    return losses, grads_of(stages), evaluated


def note_who_adds(stages, executor) -> set[Kind]:
    kinds: set[Kind] = set()
    for stage in stages.values():
        for parameter in stage.parameters():
            if hasattr(parameter, "main_grad"):
                parameter.on_main_grad = lambda: kinds.add(executor.current.kind)
    return kinds


CASES = [("1f1b", 4, 1, 8), ("interleaved", 4, 2, 7), ("zb-h1", 3, 1, 7), ("zb-v", 4, 2, 7), ("zb-h2", 4, 1, 8)]
CASES += [("1f1b", 1, 1, 3), ("gpipe", 2, 1, 20)]  # 20: more than may be in flight


@pytest.mark.parametrize(
    ("schedule", "p", "v", "m", "lanes"),
    [*((*case, False) for case in CASES), *((*case, True) for case in CASES[:4])],
)
def test_losses_and_gradients_equal_one_process(schedule, p, v, m, lanes):
    """`lanes`: as under NCCL, four groups for what must not wait for each other."""
    seed = 0.25
    losses, grads = one_process(p * v, m, seed)
    results = run_world(p, run_pipeline, schedule, m, v, seed, lanes)
    last = layout_of(schedule, p, v).rank_of(p * v - 1)
    assert [len(result[0]) for result in results] == [m if rank == last else 0 for rank in range(p)]
    torch.testing.assert_close(results[last][0], losses, rtol=1e-12, atol=0)
    torch.testing.assert_close(results[last][2][:m], losses, rtol=1e-12, atol=0)
    assert len(results[last][2]) == m + 1
    merged = {name: grad for _, part, _ in results for name, grad in part.items()}
    assert merged.keys() == grads.keys()
    torch.testing.assert_close(merged, grads, rtol=1e-12, atol=1e-14)


def fail_in_a_stage(rank: int, world: int):
    class Broken(Stage):
        def forward(self, hidden, batch):
            raise ArithmeticError("no such number")

    p2p = PipelineP2P(Axis(), HIDDEN, torch.float64, torch.device("cpu"))
    executor = PipelineExecutor({0: Broken(0, 1, WeightGradQueue())}, layout_of("1f1b", 1), p2p)
    executor.run(pipeline_lists("1f1b", 1, 1)[0], make_batches(1))


def test_an_error_names_the_action():
    with pytest.raises(RuntimeError, match=r"no such number\npipeline rank 0 was running F\(stage 0, microbatch 0\)"):
        run_world(1, fail_in_a_stage)
