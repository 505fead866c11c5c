"""Distinct elements that a kernel of Inductor reads, by evaluating the indices of its loads.

Inductor's own figure adds up the loads of a buffer and ignores their masks: a rotation, which loads each channel and
its partner, or a concatenation, which loads from one part or another, would count elements twice or none that is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import sympy
from torch._inductor.ops_handler import DefaultHandler
from torch._inductor.utils import reduction_num_outputs
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import Identity

SAMPLE = 2**17
"""Iterations that are evaluated: two samples along the outermost loop, of this many and of half as many."""

COMPARISONS: dict[str, Any] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and_": np.logical_and,
    "or_": np.logical_or,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "add": np.add,
    "sub": np.subtract,
}
"""Operations by which masks follow from indices."""

FUNCTIONS: dict[str, Any] = {
    "FloorDiv": lambda x, by: x // by,
    "ModularIndexing": lambda x, by, size: (x // by) % size,
}


class _Unknown(Exception):
    """An index depends on values of tensors."""


class _Loads(DefaultHandler):
    """Evaluates the indices and the masks of loads; other values are None."""

    def __init__(self, values: dict[sympy.Symbol, np.ndarray], found: dict[str, list[np.ndarray]]) -> None:
        self.values, self.found = values, found
        self.count = max((value.size for value in values.values()), default=1)
        self.mask: np.ndarray | None = None

    def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name not in COMPARISONS or any(arg is None for arg in args):
            return None
        return COMPARISONS[name](*args)

    def _evaluated(self, index: Any) -> np.ndarray:
        index = sympy.sympify(index).replace(Identity, lambda x: x)
        symbols = sorted(index.free_symbols, key=str)
        if any(symbol not in self.values for symbol in symbols):
            raise _Unknown
        of_index = sympy.lambdify(symbols, index, modules=[FUNCTIONS, "numpy"])
        return np.broadcast_to(of_index(*(self.values[symbol] for symbol in symbols)), (self.count,))

    def index_expr(self, expr: Any, dtype: Any) -> Any:
        return self._evaluated(expr)

    def constant(self, value: Any, dtype: Any) -> Any:
        return np.asarray(value)

    def reduction(self, dtype: Any, src_dtype: Any, reduction_type: Any, value: Any) -> Any:
        return None if reduction_num_outputs(reduction_type) == 1 else (None,) * reduction_num_outputs(reduction_type)

    def indirect_indexing(self, *args: Any, **kwargs: Any) -> Any:
        raise _Unknown

    def masked(self, mask: Any, body: Any, other: Any) -> Any:
        before = self.mask
        if mask is not None:
            whole = np.broadcast_to(mask, (self.count,))
            self.mask = whole if before is None else before & whole
        body()
        self.mask = before

    def load(self, name: str, index: Any) -> Any:
        places = self._evaluated(index)
        self.found.setdefault(name, []).append(np.unique(places if self.mask is None else places[self.mask]))


def distinct_reads(nodes: Sequence[Any]) -> dict[str, float]:
    """Elements of each buffer that the scheduler nodes of one kernel read, each counted once; {} where an index depends
    on values, or a sample would be large. Counts grow linearly with the outermost loop, or not at all: two samples of
    it determine them."""
    try:
        samples = [_sampled(nodes, SAMPLE // 2), _sampled(nodes, SAMPLE)]
    except _Unknown:
        return {}
    (few, first), (more, second) = samples
    whole = max(_outermost(node) for node in nodes)
    if more == few:
        return {name: float(count) for name, count in second.items()}
    slope = {name: (count - first.get(name, 0)) / (more - few) for name, count in second.items()}
    return {name: count + slope[name] * (whole - more) for name, count in second.items()}


def _sizes(node: Any) -> list[int]:
    return [int(V.graph.sizevars.optimization_hint(size)) for size in (*node._body.sizes[0], *node._body.sizes[1])]


def _outermost(node: Any) -> int:
    return (_sizes(node) or [1])[0]


def _sampled(nodes: Sequence[Any], iterations: int) -> tuple[int, dict[str, int]]:
    """(iterations of the outermost loop, distinct elements of each buffer that they read)"""
    inner = max(int(np.prod(_sizes(node)[1:])) for node in nodes)
    if len({_outermost(node) for node in nodes}) > 1 or inner > SAMPLE // 2:
        raise _Unknown
    outer = min(_outermost(nodes[0]), iterations // inner)
    found: dict[str, list[np.ndarray]] = {}
    for node in nodes:
        body = node._body
        symbols = [sympy.Symbol(f"i{number}", integer=True, nonnegative=True) for number in range(len(_sizes(node)))]
        grid = np.indices([outer, *_sizes(node)[1:]][: len(symbols)]).reshape(len(symbols), -1)
        split = len(body.sizes[0])
        with V.set_ops_handler(_Loads(dict(zip(symbols, grid, strict=True)), found)):
            body(symbols[:split], symbols[split:])
    return outer, {name: len(np.unique(np.concatenate(places))) for name, places in found.items()}
