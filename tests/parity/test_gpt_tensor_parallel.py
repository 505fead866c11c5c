"""The loss and every gradient at tensor- and sequence-parallel layouts equal those of one process, in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.batch import Batch
from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import ParallelState, initialize_model_parallel
from tests.extensions import needs
from tests.gpt_cases import FP64, STYLES, packed_documents, random_batch, with_dropout
from tests.harness import run_world

Gradients = dict[str, tuple[tuple[int, ...], Tensor]]


def loss_and_gradients(
    config: TransformerConfig, parallel: ModelParallelConfig, state: ParallelState, batch: Batch
) -> tuple[Tensor, Gradients]:
    """The loss, and by name the offset and the summed-up gradient of each local shard."""
    model = GPTModel(config, parallel, state)
    loss = model(None, batch)
    loss.backward()
    gradients = {}
    for name, (parameter, meta) in model.named_metas().items():
        assert parameter.grad is not None, f"{name} has no gradient"
        for axis in meta.partial_over:
            if state.axis(axis).size > 1:
                dist.all_reduce(parameter.grad, group=state.axis(axis).group)
        gradients[name] = (meta.box(state.coords)[0], parameter.grad.clone())
    return loss.detach(), gradients


def on_rank(rank: int, world: int, config: TransformerConfig, sequence_parallel: bool, batch: Batch) -> Any:
    state = initialize_model_parallel(tensor_model_parallel_size=world)
    parallel = replace(FP64, tensor_model_parallel_size=world, sequence_parallel=sequence_parallel)
    loss, gradients = loss_and_gradients(config, parallel, state, batch)
    return loss.item(), {name: (offset, grad.numpy()) for name, (offset, grad) in gradients.items()}


def assert_layout_equals_one_process(config: TransformerConfig, tp: int, sequence_parallel: bool, batch: Batch) -> None:
    loss, expected = loss_and_gradients(config, FP64, ParallelState(), batch)
    covered = {name: torch.zeros_like(grad) for name, (_, grad) in expected.items()}
    for rank_loss, gradients in run_world(tp, on_rank, config, sequence_parallel, batch):
        torch.testing.assert_close(rank_loss, loss.item(), rtol=1e-13, atol=0)
        assert gradients.keys() == expected.keys()
        for name, (offset, array) in gradients.items():
            grad, box = (
                torch.from_numpy(array),
                tuple(map(slice, offset, map(sum, zip(offset, array.shape, strict=True)))),
            )
            torch.testing.assert_close(
                grad, expected[name][1][box], rtol=1e-10, atol=1e-13, msg=lambda m, name=name: f"{name}: {m}"
            )
            covered[name][box] = 1
    assert all(bool(seen.all()) for seen in covered.values())


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(2, False), (4, True)])
def test_styles(style: str, tp: int, sequence_parallel: bool) -> None:
    config = STYLES[style]
    assert_layout_equals_one_process(config, tp, sequence_parallel, random_batch(config))


@pytest.mark.parametrize("style", ["gpt", "qwen3"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, False), (4, True)])
def test_dropout_masks_do_not_depend_on_the_layout(style: str, tp: int, sequence_parallel: bool) -> None:
    config = with_dropout(STYLES[style])
    assert_layout_equals_one_process(config, tp, sequence_parallel, random_batch(config))


@pytest.mark.parametrize("style", ["gpt", "llama", needs("linear_attention", "delta-net")])
@pytest.mark.parametrize("granularity", ["selective", "full"])
def test_packed_documents_with_recomputation(style: str, granularity: str) -> None:
    config = replace(with_dropout(STYLES[style]), recompute_granularity=granularity)
    assert_layout_equals_one_process(config, 2, True, random_batch(config, **packed_documents(config)))


@pytest.mark.parametrize("vocab_size", [101, 33])
def test_vocabulary_of_which_a_rank_holds_padding_only(vocab_size: int) -> None:
    config = replace(STYLES["gpt"], vocab_size=vocab_size, make_vocab_size_divisible_by=128)
    assert_layout_equals_one_process(config, 4, False, random_batch(config))
