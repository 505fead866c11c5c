"""Tests of Triton kernels for attention to selected keys. The kernels run in Triton's interpreter and are compared with
plain torch. The kernels are also compiled for GPUs."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.layers import HARDWARE
from megatron.extensions.attention.sparse_attention.selected_attention import (
    Attended,
    Keys,
    Rows,
    attend_to_selected,
    attended_weights,
    selected_attention_gradients,
)
from megatron.extensions.attention.sparse_attention.selection import (
    Chunk,
    Queries,
    largest_scores,
    scores_of_keys,
)
from megatron.extensions.speed.fusions.kernel_choice import RunShapes, choose_kernels
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve
from tests.tiny import TINY
from tests.triton_cases import apart, compiled, multiply_bf16, round_to_fp8_as_torch, stack_of, stack_tool

SCALE = 0.3


class Case(NamedTuple):
    """Attention problem in which the queries are the last n positions of a sequence."""

    n: int = 5
    s: int = 40
    heads: int = 3
    width: int = 24
    values: int = 20
    samples: int = 2
    sets: tuple[tuple[int, int | None], ...] = ((11, None),)
    """One tuple for each set of keys: the number of keys that a query attends to, and the window of these keys. The
    window is None for selected keys."""
    sinks: bool = False
    documents: bool = False
    dtype: torch.dtype = torch.float32


FEW = [
    Case(documents=True),
    Case(2, heads=17, width=16, values=16, sets=((9, 9), (13, None)), samples=1, sinks=True),
    Case(3, 64, 4, 32, 32, 1, sets=((17, None),), dtype=torch.bfloat16),
]
MANY = [
    Case(sets=((40, 40),), samples=1, dtype=torch.float16),
    Case(1, 5, 1, 8, 8, 1, ((1, None),)),
    Case(4, 70, 33, 80, 64, 1, ((33, None),)),
    Case(6, 33, 2, 40, 24, 3, ((4, 4), (33, 33), (7, None)), True, True),
    Case(3, 90, 16, 72, 64, 2, ((64, None),), dtype=torch.float16),
]


def keys_of(case: Case, count: int, window: int | None, generator: torch.Generator) -> Keys:
    """Return the set of keys that each query attends to. The first queries attend to fewer keys than the others."""
    places = torch.arange(case.s - case.n, case.s)[:, None].repeat(1, case.samples)
    places[0] = min(1, case.s - 1)
    begins = (places - torch.arange(case.samples) - 8).clamp(min=0) if case.documents else torch.zeros_like(places)
    first = begins if window is None else (places - window + 1).maximum(begins)
    queries = Queries(first, places, (Chunk(slice(0, case.n), case.s),), HARDWARE, count)
    if window is not None:
        return Keys(queries)
    scores = torch.rand(case.n, case.samples, case.s, generator=generator)
    scores = scores.masked_fill(queries.hidden(queries.chunks[0]), -1.0)
    found = scores.topk(count).indices.sort(-1).values
    return Keys(queries, found.masked_fill(scores.gather(-1, found) < 0, -1).to(torch.int32))


class Operands(NamedTuple):
    q: Tensor
    sinks: Tensor | None
    seen: tuple[Keys, ...]
    k: tuple[Tensor, ...]
    grad: Tensor


def operands(case: Case) -> Operands:
    generator = torch.Generator().manual_seed(case.s)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(case.dtype)

    whole = random(case.n, case.samples, case.heads, case.width + 8)
    k = tuple(random(case.s, case.samples, case.width) for _ in case.sets)
    seen = tuple(keys_of(case, *each, generator) for each in case.sets)
    sinks = torch.linspace(-1, 1, case.heads) if case.sinks else None
    grad = random(case.n, case.samples, case.heads, case.values)
    return Operands(whole[..., : case.width], sinks, seen, k, grad)


def plain(case: Case, given: Operands) -> tuple[Attended, tuple[Tensor, ...]]:
    """Compute the reference result with plain torch in fp32, from the operands that the kernels use."""
    q, sinks, seen, k, grad = given
    q, grad, k = q.float(), grad.float(), tuple(x.float() for x in k)
    found = attend_to_selected(q, sinks, seen, k, SCALE, case.values, True)
    return found, selected_attention_gradients(grad, q, found.out, found.lse, seen, k, SCALE, case.values)


def interpreted() -> Any:
    """Return the Triton kernels for Triton's interpreter on the CPU, with small blocks."""
    from megatron.extensions.attention.sparse_attention.kernels import attention, attention_triton

    multiply_bf16()
    round_to_fp8_as_torch()
    blocks = attention_triton.Blocks(16, 16, 4, 1)
    tile = attention_triton.Tile(16, 32, (32, 16), 4, 1)
    attention_triton.tiling = lambda device: attention_triton.Tiling(blocks, blocks, blocks, tile)
    attention_triton.MOST_BYTES = 2**10
    attention_triton.SCAN = 16
    for name in ("_attend", "_gradients", "_weights"):
        operator = getattr(attention, name)
        setattr(attention, name, getattr(operator, "_init_fn", operator))
    return attention


def by_kernels(kernels: Any, case: Case, given: Operands, adds: bool) -> tuple[Attended, tuple[Tensor, ...]]:
    kernels.adds_gradients = lambda device, keys, count: adds
    q, sinks, seen, k, grad = given
    found = kernels.attend(q, sinks, seen, k, SCALE, case.values, True)
    return found, kernels.gradients(grad, q, found.out, found.lse, seen, k, SCALE, case.values)


def tensors_of(found: tuple[Attended, tuple[Tensor, ...]]) -> Iterator[Tensor]:
    for each in (*found[0], *found[1]):
        assert each is not None
        yield each


def weights_by_both(kernels: Any, case: Case, given: Operands, found: Attended) -> tuple[Tensor, Tensor]:
    """Return the attention weights of selected keys, summed over heads, in two versions: computed by the kernel, and
    computed by plain torch in fp32."""
    q, sinks, seen, k, _ = given
    queries, picked = seen[-1]
    beside = None
    if len(k) > 1:
        others = tuple(x.float() for x in k[:-1])
        beside = attend_to_selected(q.float(), sinks, seen[:-1], others, SCALE, case.values, False).lse
    own, wide = (Rows(x, y, queries, queries.chunks[0], picked) for x, y in ((q, k[-1]), (q.float(), k[-1].float())))
    assert own.picked is not None
    return kernels.weights(q, own, SCALE, beside, found.lse), attended_weights(wide.q, wide, SCALE, beside, None)


def check(cases: Sequence[Case]) -> None:
    kernels = interpreted()
    for case in cases:
        given = operands(case)
        expected = plain(case, given)
        for adds in (True, False):
            found = by_kernels(kernels, case, given, adds)
            if not adds:
                again = by_kernels(kernels, case, given, adds)
                assert all(map(torch.equal, tensors_of(found), tensors_of(again)))
            assert found[0].out.dtype == case.dtype and found[1][0].dtype == case.dtype
            pairs = [*zip(tensors_of(found), tensors_of(expected), strict=True)]
            if adds and case.sets[-1][1] is None:
                pairs.append(weights_by_both(kernels, case, given, expected[0]))
            for one, other in pairs:
                assert one.shape == other.shape and not one.isnan().any()
                # the norm of `other` may be zero if there is a single key
                error = (one.float() - other).norm() / other.norm().clamp(min=1e-2)
                bound = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[case.dtype]
                assert error < bound, (case, adds, error)


@pytest.mark.grid("cases", ["few"], ["few", "many"])
@apart(interpret=True)
def test_interpreted_kernels_match_plain_torch(cases: str) -> None:
    """Outputs and all gradients agree with those of plain torch, both with atomic additions and with ordered sums. The
    cases cover odd sizes, several sets of keys, windows, documents and sinks."""
    check(FEW if cases == "few" else MANY)


TWO_SETS = Case(3, 20, 2, 16, 16, 1, ((3, 3), (14, None)), sinks=True)
MUTANTS = {
    "the last key is left out": ("rows", "start + j + 1, 0)", "start + j, 0)"),
    "places without a key are seen": ("attention", 'tl.where((key >= 0)[:, None], scores, float("-inf"))', "scores"),
    "sums of the first set have one key more": ("attention", "start + j < first", "start + j <= first"),
    "sinks are left out": ("attention", "lse, lse_first = _log2_sum(lse, of_sinks), ", "lse, lse_first = lse, "),
    "outputs do not count in gradients": (
        "attention",
        "products(keys, grads) - deltas[None, :]",
        "products(keys, grads)",
    ),
    "values have no gradient": ("attention", "dot(p, grads, tl.dot(", "dot(p, grads * 0, tl.dot("),
    "values have no gradient in the second pass": ("key_sums", "acc = dot(p, ", "acc = dot(p * 0, "),
    "the last part has no queries": ("key_sums", "found * (part + 1) //", "found * part //"),
    "earlier keys of equal scores": ("selection", "number > equal - wanted", "number <= wanted"),
    "products below zero count": ("selection", "tl.maximum(products, 0.0)", "products"),
}


@contextmanager
def with_edit(edited: str, old: str, new: str) -> Iterator[None]:
    """Reload all kernel modules within the context, and replace `old` with `new` in the source of the module `edited`.
    Triton reads the source of a kernel when the kernel first runs."""
    package = import_module("megatron.extensions.attention.sparse_attention.kernels")
    with tempfile.TemporaryDirectory() as folder:
        for part in ("rows", "key_sums", "attention", "selection", "divergence"):
            text = Path(package.__path__[0], f"{part}_triton.py").read_text(encoding="utf-8")
            assert part != edited or text.count(old) == 1, old
            path = Path(folder) / f"{part}_triton.py"
            path.write_text(text.replace(old, new) if part == edited else text, encoding="utf-8")
            spec = spec_from_file_location(f"{package.__name__}.{part}_triton", path)
            assert spec is not None and spec.loader is not None
            sys.modules[spec.name] = module = module_from_spec(spec)
            setattr(package, f"{part}_triton", module)
            spec.loader.exec_module(module)
        yield


@pytest.mark.grid("names", [["places without a key are seen"]], [list(MUTANTS)])
@apart(interpret=True)
def test_edited_kernels_differ(names: Sequence[str]) -> None:
    for name in names:
        edit = MUTANTS[name]
        run = interpreted_selection if edit[0] == "selection" else lambda: check([TWO_SETS])
        with with_edit(*edit), pytest.raises(AssertionError):
            run()


RUNS = {
    "dsa": "--experimental-attention-variant dsa --kv-lora-rank 16 --qk-pos-emb-head-dim 8 --dsa-indexer-topk 5",
    "compressed": "--experimental-attention-variant dsv4_hybrid --csa-compress-ratios [0,4] --csa-window-size 3 "
    "--qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 16 --o-groups 2 --dsa-indexer-topk 2",
}


@pytest.mark.grid("kind", ["compressed"], ["dsa", "compressed"])
@apart(interpret=True)
def test_interpreted_kernels_pass_the_startup_comparison(kind: str) -> None:
    """The test runs the comparison with plain torch that a training run makes at startup, on operands with the shapes
    of the run's layers."""
    kernels = interpreted()
    kernels.suits = lambda q, width: True
    kernels.adds_gradients = lambda device, keys, count: True
    flags = f"{TINY} --num-layers 2 --seq-length 16 --vocab-size 12 --bf16 --multi-latent-attention {RUNS[kind]}"
    shapes = RunShapes.of(resolve(parse_args(flags.split()), 1), torch.device("cpu"))
    own = {"attend_to_selected": kernels.ATTEND, "selected_attention_gradients": kernels.GRADIENTS}
    own |= {"attended_weights": kernels.WEIGHTS}
    assert len(list(kernels.ATTEND.samples(shapes))) == {"dsa": 1, "compressed": 2}[kind]
    said: list[str] = []
    choose_kernels(shapes, Axis(), None, said.append, own)
    assert not said
    del own["attended_weights"]
    kernels.adds_gradients = lambda device, keys, count: False
    theirs = kernels.joined_sets

    def of_other_queries(*sets: Any) -> tuple[Tensor, Tensor, int]:
        keys, picked, first = theirs(*sets)
        return keys, picked.roll(1, 0), first

    kernels.joined_sets = of_other_queries
    choose_kernels(shapes, Axis(), None, said.append, own)
    assert [line.split(" differs")[0] for line in said] == [f" kernel {name} left out:" for name in own], said


def check_selection(device: str) -> None:
    """Check the scores and the selected keys. The inputs include equal scores, positive and negative zeros, and queries
    with few keys."""
    from megatron.extensions.attention.sparse_attention.kernels import selection

    generator = torch.Generator().manual_seed(3)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for n, b, heads, width, keys in ((3, 2, 17, 24, 37), (40, 1, 64, 128, 1000))[: 2 if device == "cuda" else 1]:
        q, k, weights = (
            torch.randn(size, generator=generator).to(dtype)
            for size in ((n, b, heads, width), (keys, b, width), (n, b, heads))
        )
        expected = scores_of_keys(q, k, weights)
        found = selection.scores(q.to(device), k.to(device), weights.to(device)).cpu()
        assert (found - expected).norm() <= (1e-2 if device == "cuda" else 3e-6) * expected.norm()
    sizes = ((3, 1, 40, 5), (2, 2, 9, 9))
    for n, b, keys, topk in ((200, 2, 3000, 1024), (5, 1, 20000, 2048), *sizes) if device == "cuda" else sizes:
        scores = torch.randn(n, b, keys, generator=generator)
        rough = scores.mul(2).round().mul(torch.where(scores > 0.2, -1.0, 1.0))
        last = torch.randint(keys, (n, b), generator=generator)
        last[0], last[-1] = keys - 1, 1
        for first in (torch.zeros_like(last), (last - 6).clamp(min=0)):
            for each in (scores, rough):
                found = selection.largest(*(x.to(device) for x in (each, first, last)), topk).cpu()
                assert found.equal(largest_scores(each, first, last, topk)), (n, b, keys, topk)


@apart(interpret=True)
def test_interpreted_selection_matches_plain_torch() -> None:
    interpreted_selection()


def interpreted_selection() -> None:
    from megatron.extensions.attention.sparse_attention.kernels import selection, selection_triton

    selection_triton.KEYS, selection_triton.QUERIES, selection_triton.PLACES = 16, 2, 16
    for name in ("_scores", "_largest"):
        operator = getattr(selection, name)
        setattr(selection, name, getattr(operator, "_init_fn", operator))
    check_selection("cpu")


def check_on_gpu() -> None:
    """Check the kernels on a GPU with the head widths of published models. If key gradients are summed in a second
    pass, they are bit-identical in every run."""
    from megatron.extensions.attention.sparse_attention.kernels import attention

    check_selection("cuda")
    cases = [
        Case(70, 300, 32, 576, 512, 1, ((128, None),), dtype=torch.bfloat16),
        Case(33, 200, 64, 512, 512, 2, ((32, 32), (48, None)), True, True, dtype=torch.bfloat16),
        Case(20, 500, 20, 192, 128, 1, ((257, None),), dtype=torch.float16),
    ]
    several = torch.cuda.get_device_capability()[0] in (9, 10)
    for case in cases:
        given = operands(case)
        expected = plain(case, given)
        on_gpu = moved(given)
        for adds in (True, False)[1 - several :]:
            found = by_kernels(attention, case, on_gpu, adds)
            for one, other in zip(tensors_of(found), tensors_of(expected), strict=True):
                assert ((one.float().cpu() - other).norm() / other.norm()).item() < 1e-2, (case, adds)
        again = by_kernels(attention, case, on_gpu, False)
        assert all(map(torch.equal, tensors_of(found), tensors_of(again)))


def moved(given: Operands) -> Operands:
    """Move the operands to the GPU."""

    def on_gpu(keys: Keys) -> Keys:
        queries = keys.queries._replace(first=keys.queries.first.cuda(), last=keys.queries.last.cuda())
        return Keys(queries, None if keys.picked is None else keys.picked.cuda())

    q, sinks, seen, k, grad = given
    sinks = None if sinks is None else sinks.cuda()
    return Operands(q.cuda(), sinks, tuple(map(on_gpu, seen)), tuple(x.cuda() for x in k), grad.cuda())


WIDTHS = (512, 64, 128, 64)
"""Channel widths of DeepSeek-V3.2."""

ROWS = ("*bf16", "i64", "i64", "i64")
TYPES: dict[str, Any] = {
    **dict.fromkeys(("k", "out", "dq", "weights", "ds"), "*bf16"),
    **dict.fromkeys(("picked", "lists"), "*i32"),
    **dict.fromkeys(("lse", "delta", "sinks", "dk"), "*fp32"),
    **dict.fromkeys(("to_log2", "scale"), "fp32"),
    **{"sums": ("*fp32",) * 3, "readers": ("*i32",) * 3, "kept": ("*bf16",) * 2},
}
OF_KEYS = {"WIDTH": 576, "VALUES": 512, "SLICES": 3, "HEADS": 32}
MOST_STACK = {80: 0, 90: 520, 100: 16}
"""Largest number of bytes that a thread may spill, keyed by compute capability. On Hopper, threads spill operand
descriptors that are created before the loop."""


@pytest.mark.grid(
    ("kernels", "capabilities"),
    [(["forward"], [90])],
    [(["forward", "of_queries", "adding", "of_keys"], [80, 90, 100])],
)
@apart(interpret=False)
def test_kernels_compile_to_tensor_core_instructions(kernels: Sequence[str], capabilities: Sequence[int]) -> None:
    """The kernels fit into shared memory and registers."""
    from megatron.extensions.attention.sparse_attention.kernels import attention_triton, key_sums_triton

    rows: Any = attention_triton.Rows(*ROWS)  # type: ignore[arg-type]
    for capability in capabilities:
        tiling = {90: attention_triton.HOPPER, 100: attention_triton.BLACKWELL}.get(capability, attention_triton.SMALL)
        for name in kernels:
            if name == "adding" and capability == 80:
                continue  # on this architecture, a second kernel computes the sums instead
            kernel, least = {
                "forward": (attention_triton.selected_forward, 9),
                "of_keys": (key_sums_triton.selected_sum, 4),
            }.get(name, (attention_triton.selected_backward, 14))
            blocks = getattr(tiling, name)
            sizes = ("i32",) * (3 if kernel is attention_triton.selected_backward else 4)
            types = TYPES | {"q": rows, "grad": rows, "sizes": sizes}
            types |= {"dk": None} if name == "of_queries" else {"kept": None} if name == "adding" else {}
            constants = {"WIDTHS": WIDTHS, "BLOCKS": blocks[:2], "SCAN": 1024, **OF_KEYS}
            if name == "of_keys":
                constants |= {"KEYS": blocks.keys, "ROWS": blocks.columns // 32}
                constants |= {"WIDE": blocks.channels[0], "NARROW": blocks.channels[1]}
            constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
            built = compiled(kernel, types, constants, capability, num_warps=blocks.warps, num_stages=blocks.stages)
            ptx = built.asm["ptx"]
            products = sum(map(ptx.count, ("wgmma.mma_async.sync", "mma.sync", "tcgen05.mma")))
            assert products >= least, (name, capability)
            assert "cp.async" in ptx or blocks.stages == 1, (name, capability)
            assert built.metadata.shared <= {80: 99}.get(capability, 227) * 1024
            if stack_tool() is not None:
                assert stack_of(built) <= (0 if name == "of_keys" else MOST_STACK[capability]), (name, capability)


@pytest.mark.grid("capabilities", [[90]], [[80, 90, 100]])
@apart(interpret=False)
def test_selection_kernels_compile(capabilities: Sequence[int]) -> None:
    """The compiled kernels spill at most two registers."""
    from megatron.extensions.attention.sparse_attention.kernels import selection_triton as triton

    types = {**dict.fromkeys(("q", "k", "weights"), "*bf16"), "out": "*fp32", "sizes": ("i32",) * 4}
    constants = {"WIDTH": 128, "HELD": 128, "HEADS": 64, "BLOCKS": (triton.KEYS, triton.QUERIES)}
    of_rows = {"scores": "*fp32", **dict.fromkeys(("first", "last"), "*i64"), "out": "*i32", "sizes": ("i32",) * 3}
    of_rows |= dict.fromkeys(("bound_rows", "bound_samples"), "i32")
    for capability in capabilities:
        built = compiled(triton.score_keys, types, constants, capability, num_warps=8, num_stages=2)
        products = ("wgmma.mma_async.sync", "mma.sync", "tcgen05.mma")
        assert sum(map(built.asm["ptx"].count, products)) >= 8 and built.metadata.shared <= 99 * 1024
        selects = compiled(triton.select_largest, of_rows, {"PLACES": triton.PLACES}, capability, num_warps=4)
        if stack_tool() is not None:
            assert stack_of(built) == 0 and stack_of(selects) <= 8
