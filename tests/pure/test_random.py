"""Tests of random numbers that must not depend on the parallel layout, which are initial weights and dropout masks. The
tests need no process group."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core import dropout as random
from megatron.core import init
from megatron.core.dropout import attention_dropout, dropout
from megatron.core.init import initialize_parameters_, site_key
from megatron.core.param_meta import Init, ParamMeta

KEY = site_key(1234, "decoder.layers.3.mlp.dropout")


def shard(meta: ParamMeta, rank: int, size: int, seed: int = 7, dtype: torch.dtype = torch.float32) -> Tensor:
    coords = {"tp": (rank, size), "ep": (0, 1), "expt_tp": (0, 1)}
    param = torch.nn.Parameter(torch.empty(meta.box(coords)[1], dtype=dtype))
    param.meta = meta
    initialize_parameters_([param], seed, coords)
    return param.detach()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use blocks that are far smaller than a tensor, so that blocks begin and end in the middle of rows."""
    monkeypatch.setattr(init, "BLOCK", 37)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((24, 10), 0), ((24, 10), 1), ((8, 20), 1), ((2, 12, 5), 1), ((4, 3, 2, 7), 0), ((3, 5, 8), 2), ((40,), 0)],
)
@pytest.mark.usefixtures("small_blocks")
def test_shards_equal_parts_of_the_whole_tensor(shape: tuple[int, ...], dim: int) -> None:
    size_of = [s for s in (1, 2, 4) if shape[dim] % s == 0]
    assert size_of[-1] > 1
    meta = ParamMeta("decoder.layers.0.mlp.linear_fc1.weight", shape, {"tp": dim}, Init("normal", 0.02), role="hidden")
    whole = shard(meta, 0, 1)
    for size in size_of:
        parts = [shard(meta, rank, size) for rank in range(size)]
        assert torch.equal(torch.cat(parts, dim), whole)
    for dtype in (torch.bfloat16, torch.float64):
        assert torch.equal(shard(meta, 0, 1, dtype=dtype), whole.to(dtype))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("threads", [2, 5])
def test_threads_change_no_bit(threads: int) -> None:
    """There are more blocks than threads. The blocks belong to several parameters, and one of these parameters is
    sharded."""
    cut = ParamMeta("decoder.layers.0.mlp.linear_fc1.weight", (40, 30), {"tp": 1}, Init("normal", 0.02), role="hidden")
    metas = [
        cut,
        ParamMeta("bias", (7,), {}, Init("zeros"), role="bias"),
        ParamMeta("head", (50, 3), {}, Init("normal", 1.0), role="hidden"),
    ]

    def drawn(threads: int) -> list[Tensor]:
        coords = {"tp": (1, 3)}
        params = [torch.nn.Parameter(torch.full(meta.box(coords)[1], torch.nan)) for meta in metas]
        for param, meta in zip(params, metas, strict=True):
            param.meta = meta
        initialize_parameters_(params, 7, coords, threads)
        return params

    for one, other in zip(drawn(threads), drawn(1), strict=True):
        assert torch.equal(one, other)


def test_values_depend_on_seed_and_parameter_name() -> None:
    def values(name: str, seed: int) -> Tensor:
        return shard(ParamMeta(name, (50, 40), {}, Init("normal", 1.0), role="hidden"), 0, 1, seed)

    base = values("a", 1)
    assert torch.equal(base, values("a", 1))
    for other in (values("b", 1), values("a", 2)):
        assert abs((base * other).mean().item()) < 0.1


@pytest.mark.parametrize(("kind", "low", "high"), [("uniform", -0.5, 0.5), ("log_of_uniform", 1.0, 16.0)])
def test_uniform_numbers_fill_their_range(kind: str, low: float, high: float) -> None:
    """All numbers are in the range and are distributed evenly over it. A shard contains the same numbers as the
    corresponding part of the whole tensor."""
    meta = ParamMeta("a", (40, 50), {"tp": 0}, Init(kind, low=low, high=high), role="hidden")
    whole = shard(meta, 0, 1)
    numbers = whole.exp() if kind == "log_of_uniform" else whole
    assert low - 1e-5 <= numbers.min() and numbers.max() < high + 1e-5
    histogram = torch.histc(numbers.float(), bins=8, min=low, max=high)
    assert histogram.min() > 180 and histogram.max() < 320
    assert torch.equal(shard(meta, 1, 2), whole[20:])


def test_constants_are_filled_and_unknown_kinds_refused() -> None:
    assert torch.equal(shard(ParamMeta("b", (6,), {"tp": 0}, Init("zeros"), role="bias"), 1, 2), torch.zeros(3))
    assert torch.equal(shard(ParamMeta("n", (6,), {}, Init("ones"), role="norm"), 0, 1), torch.ones(6))
    with pytest.raises(ValueError, match=r"w: Init kind 'xavier' is none of"):
        shard(ParamMeta("w", (6,), {}, Init("xavier"), role="vector"), 0, 1)


class LargestTensor(TorchDispatchMode):
    """Dispatch mode that records the size of the largest tensor that an operator creates. Tensors that share storage
    with the tensors in `known` are ignored."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in self.known:
            self.largest = max(self.largest, result.untyped_storage().nbytes() // result.element_size())
        return result


@pytest.mark.parametrize("dim", [0, 1])
def test_initialization_allocates_only_the_shard_and_one_block(dim: int) -> None:
    """A tensor of 16 blocks is sharded over 64 ranks. A rank initializes its shard without allocating more than one
    block at a time."""
    meta = ParamMeta("w", (4096, 4096), {"tp": dim}, Init("normal", 0.02), role="hidden")
    coords = {"tp": (5, 64)}
    param = torch.nn.Parameter(torch.empty(meta.box(coords)[1]))
    param.meta = meta
    with LargestTensor([param]) as seen:
        initialize_parameters_([param], 7, coords)
    assert 0 < seen.largest <= init.BLOCK


# Dropout


def hidden_mask(samples: Tensor, s: int = 16, h: int = 24, offset: int = 0, p: float = 0.25, key: int = KEY) -> Tensor:
    return dropout(torch.ones(s, len(samples), h), p, key, samples, offset) == 0


def attention_mask(shape: tuple[int, ...], samples: Tensor, *offsets: int, p: float = 0.25) -> Tensor:
    return attention_dropout(torch.ones(shape), p, KEY, samples, *offsets) == 0


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_dropout_has_the_right_rate_and_scale(p: float) -> None:
    samples = torch.arange(4)
    x = torch.rand(64, 4, 512) + 0.5
    y = dropout(x, p, KEY, samples)
    kept = y != 0
    sigma = math.sqrt(p * (1 - p) / x.numel())
    assert abs(1 - kept.float().mean().item() - p) < 5 * sigma
    torch.testing.assert_close(y[kept], x[kept] / (1 - p))
    mask = attention_mask((4, 8, 64, 64), samples, p=p)
    assert abs(mask.float().mean().item() - p) < 5 * math.sqrt(p * (1 - p) / mask.numel())


def test_masks_are_independent_in_every_direction() -> None:
    """Adjacent elements of a mask are equal as often as expected for independent elements, along each dim. The same is
    true of the elements at one position in the masks of different samples, dropout modules and heads. In each row and
    column, the fraction of dropped elements is as expected."""
    p, n = 0.5, 128 * 6 * 512
    samples = torch.tensor([0, 1, 2, 3, 1000, 2**33])
    mask = hidden_mask(samples, 128, 512, p=p).float()
    bound = 5 * 0.5 / math.sqrt(n)
    for other in (
        mask.roll(1, 0),
        mask.roll(1, 1),
        mask.roll(1, 2),
        mask.roll((1, 1), (0, 2)),
        mask.roll((1, -1), (0, 2)),
        hidden_mask(samples, 128, 512, p=p, key=site_key(1234, "decoder.layers.4.mlp.dropout")).float(),
        hidden_mask(samples, 128, 512, p=p, key=site_key(1235, "decoder.layers.3.mlp.dropout")).float(),
    ):
        assert abs((mask == other).float().mean().item() - 0.5) < bound
    for dims in ((0, 1), (1, 2), (0, 2)):
        count = n // mask.mean(dims).numel()
        assert (mask.mean(dims) - p).abs().max().item() < 5 * math.sqrt(p * (1 - p) / count)
    heads = attention_mask((1, 16, 64, 64), torch.tensor([0]), p=p).float()
    assert abs((heads == heads.roll(1, 1)).float().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(heads.numel())


def test_corners_of_mask_rectangles_are_independent() -> None:
    """The hash of an element depends only on the sum of its row's bits and its column's bits. Nevertheless, the
    elements at the four corners of a rectangle must be independent."""
    mask = hidden_mask(torch.arange(8), 128, 512, p=0.5)
    corners = mask ^ mask.roll(1, 0) ^ mask.roll(1, 2) ^ mask.roll((1, 1), (0, 2))
    assert abs(corners.float().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(mask.numel())


def test_dropout_is_a_function_of_its_arguments() -> None:
    samples = torch.arange(3)
    x = torch.randn(8, 3, 10, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(0)
    first = dropout(x, 0.3, KEY, samples)
    torch.manual_seed(1)
    assert torch.equal(first, dropout(x, 0.3, KEY, samples))
    assert dropout(x, 0.0, KEY, samples) is x
    assert torch.autograd.gradcheck(lambda t: dropout(t, 0.3, KEY, samples), x)
    probs = torch.rand(3, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: attention_dropout(t, 0.3, KEY, samples), probs)


@pytest.mark.parametrize("chunk", [random.HASH_CHUNK, 100])
def test_masks_match_exact_integer_arithmetic(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash is also computed with Python's unbounded integers. Equal results show that overflows and shifts of torch
    do not depend on the machine."""
    monkeypatch.setattr(random, "HASH_CHUNK", chunk)

    def absorb(state: int, value: int) -> int:
        x = (value * 0x9E3779B97F4A7C15 + state) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    def dropped(row: int, column: int, p: float) -> bool:
        # Adding 2**31 to the signed hash makes it unsigned, so that it can be compared with p * 2**32.
        x = (row + absorb(0, column) + 2**32) % 2**32
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return (x + 2**31) % 2**32 < p * 2**32

    samples, p = [0, 123456789012], 0.25
    expected = [[[dropped(absorb(absorb(KEY, b), s), h, p) for h in range(40)] for b in samples] for s in range(3, 12)]
    assert hidden_mask(torch.tensor(samples), 9, 40, offset=3, p=p).tolist() == expected
