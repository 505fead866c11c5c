"""Tests of the number, kind and size of the collectives that a tensor-parallel layer, the embedding and the output
layer launch.

The forward and backward passes of a layer together have 4 all-reduces of s*b*h elements. With sequence parallelism,
there are 4 all-gathers and 4 reduce-scatters of the same size instead. In addition, each column-parallel layer
all-gathers its input again for the weight gradient. In a ring of t ranks, an all-reduce sends 2 (t-1)/t times the size
of its operand. An all-gather and a reduce-scatter each send (t-1)/t of the whole tensor. Both variants therefore send
the same number of bytes (arXiv 2205.05198, section 4.2.2). On CPU, reduce-scatters are implemented as all-to-alls,
which send the same number of bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core import collectives
from megatron.core.batch import Batch
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import initialize_model_parallel
from tests.gpt_cases import GPT, STYLES
from tests.harness import run_world

B, S, H = 2, GPT.seq_length, GPT.hidden_size
NAMES = {
    collectives.ALL_GATHER: "all_gather",
    collectives.REDUCE_SCATTER: "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "all_reduce": "all_reduce",
}
OTHERS = ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")

Call = tuple[str, int]
"""Kind of a collective, and size of its unsharded tensor in bytes."""


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Yield a list that records the collectives that this process launches through torch.distributed."""
    calls: list[Call] = []
    originals = {name: getattr(dist, name) for name in (*NAMES, *OTHERS)}

    def recording(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sizes = [arg.numel() * arg.element_size() for arg in args if isinstance(arg, Tensor)]
            calls.append((NAMES.get(name, name), max(sizes, default=0)))
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, recording(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def ring_bytes(calls: list[Call], size: int) -> Fraction:
    """Return the number of bytes that a rank sends in the given collectives. All collectives except all-to-all use ring
    algorithms. In an all-to-all, a rank sends every block except the block that it keeps."""
    steps = {"all_reduce": 2, "all_gather": 1, "all_to_all": 1}
    return sum((Fraction(size - 1, size) * steps[kind] * nbytes for kind, nbytes in calls), Fraction(0))


def all_reduce(nbytes: int, size: int) -> Call:
    """Return the collective call that is expected for an all-reduce of `nbytes` bytes on CPU. If there are only two
    ranks, they exchange their operands by an all-to-all instead."""
    return ("all_to_all", 2 * nbytes) if size == 2 else ("all_reduce", nbytes)


def run_model(rank: int, size: int, layers: int, sp: bool, style: str, dtype: str) -> tuple[list[Call], list[Call]]:
    """Return the collectives that a model launches in one forward pass and in one backward pass."""
    config = replace(STYLES[style], num_layers=layers)
    parallel = ModelParallelConfig(tensor_model_parallel_size=size, sequence_parallel=sp, **{dtype: True})
    model = GPTModel(config, parallel, initialize_model_parallel(size))
    for param in model.parameters():
        param.main_grad = torch.zeros(param.shape)
    with recorded() as forward:
        loss = model(None, Batch.of_tokens(torch.arange(B * S).view(B, S)))
    with recorded() as backward:
        loss.backward()
    return forward, backward


def per_layer(size: int, *args: Any) -> tuple[list[Call], list[Call]]:
    """Return the collectives of one layer, computed as half of the difference between a model with three layers and a
    model with one layer."""
    one, three = (run_world(size, run_model, layers, *args) for layers in (1, 3))
    assert all(result == one[0] for result in one) and all(result == three[0] for result in three)
    phases = []
    for short, long in zip(one[0], three[0], strict=True):
        extra = Counter(long) - Counter(short)
        assert not Counter(short) - Counter(long) and all(count % 2 == 0 for count in extra.values())
        phases.append([call for call, count in extra.items() for _ in range(count // 2)])
    return phases[0], phases[1]


KINDS = [(2, "gpt", "fp32", 4), (4, "qwen3", "bf16", 2)]


@pytest.mark.parametrize(("size", "style", "dtype", "itemsize"), KINDS)
def test_collectives_of_a_tensor_parallel_layer(size: int, style: str, dtype: str, itemsize: int) -> None:
    forward, backward = per_layer(size, False, style, dtype)
    sbh = S * B * H * itemsize
    assert forward == backward == [all_reduce(sbh, size)] * 2
    assert ring_bytes(forward + backward, size) == 4 * 2 * Fraction(size - 1, size) * sbh


@pytest.mark.parametrize(("size", "style", "dtype", "itemsize"), KINDS)
def test_collectives_of_a_sequence_parallel_layer(size: int, style: str, dtype: str, itemsize: int) -> None:
    forward, backward = per_layer(size, True, style, dtype)
    sbh = S * B * H * itemsize
    # The inputs of linear_qkv and linear_fc1 are gathered again, because only their local shards are saved for the
    # backward pass.
    regathers = 2
    assert Counter(forward) == {("all_gather", sbh): 2, ("all_to_all", sbh): 2}
    assert Counter(backward) == {("all_gather", sbh): 2 + regathers, ("all_to_all", sbh): 2}
    hidden = regathers * Fraction(size - 1, size) * sbh
    assert ring_bytes(forward + backward, size) - hidden == 4 * 2 * Fraction(size - 1, size) * sbh


@pytest.mark.parametrize("sp", [False, True])
def test_collectives_of_the_embedding_and_the_output_layer(sp: bool) -> None:
    """The embedding and the output layer each have one collective, either in the forward or in the backward pass. With
    sequence parallelism, both have one collective in each pass, and the output layer gathers its input again. The loss
    gathers three numbers per token. The logits are never communicated."""
    size, sbh = 2, S * B * H * 4
    ((forward, backward), _) = run_world(size, run_model, 0, sp, "gpt", "fp32")
    loss = ("all_gather", size * 3 * S * B * 4)
    if sp:
        assert forward == [("all_to_all", sbh), ("all_gather", sbh), loss]
        assert Counter(backward) == {("all_gather", sbh): 2, ("all_to_all", sbh): 1}
    else:
        assert forward == [all_reduce(sbh, size), loss]
        assert backward == [all_reduce(sbh, size)]


def test_one_rank_sends_nothing() -> None:
    assert run_world(1, run_model, 2, False, "gpt", "fp32") == [([], [])]
