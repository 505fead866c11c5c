"""Results of operators on torch's meta device, which have a shape and no values, without torch's compiler.

torch has rules for the meta device, and they hold here for every operator not named below. But most of them import
symbolic shapes or the compiler at their first use, which takes longer than to import torch. So the operators of the
layers here have rules of their own, equal to torch's (`tests/pure/test_shape_rules.py`). A plan of a layer with other
operators, as one of an extension, takes longer and is no different.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
META = torch.device("meta")
Rule = Callable[..., Any]


@cache
def rule_of(func: Any) -> Rule:
    """The function that computes an operator's results on meta tensors: a rule from here, or the operator itself, which
    applies torch's."""
    if func in RULES:
        return RULES[func]
    if torch.Tag.inplace_view in func.tags or torch.Tag.nondeterministic_seeded in func.tags or func.is_view:
        return func
    results, arguments = func._schema.returns, func._schema.arguments
    if len(results) == 1 and results[0].alias_info is not None:
        written = [
            argument for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if len(written) == 1 and written[0].kwarg_only:
            return partial(_out, func, written[0].name)
        if len(written) == 1 and written[0] is arguments[0]:
            return _in_place
    pointwise = torch.Tag.pointwise in func.tags and not func._schema.is_mutable
    return partial(_pointwise, func) if pointwise else func


def _in_place(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def _out(func: Any, name: str, *args: Any, **kwargs: Any) -> Tensor:
    return kwargs[name] if kwargs[name].numel() else func(*args, **kwargs)  # an empty one grows


def _new(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _pointwise(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The operator itself tells the dtype and the order of strides, on operands with at most two elements a dim."""
    shape = np.broadcast_shapes(*(x.shape for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)))
    small = func(*tree_map(_small, args), **{key: tree_map(_small, value) for key, value in kwargs.items()})
    return torch.empty_permuted(shape, _order(small), dtype=small.dtype, device=META)


def _small(x: Any) -> Any:
    """Ones with two elements in place of each dim of more, strides ordered as those of x; and the device of these."""
    if isinstance(x, torch.device):
        return torch.device("cpu")
    if not isinstance(x, Tensor):
        return x
    order, shape = _order(x), [min(size, 2) for size in x.shape]
    kept = [1 if x.stride(dim) == 0 else shape[dim] for dim in order]
    places = sorted(range(x.ndim), key=order.__getitem__)
    return torch.ones(kept, dtype=x.dtype).permute(places).expand(shape)


def _order(x: Tensor) -> list[int]:
    """The dims of x from the largest stride to the smallest."""
    strides = x.stride()
    return sorted(range(x.ndim), key=lambda dim: -strides[dim])


def _filled(func: Any, size: Sequence[int], *value: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _new(size, dtype or func([], *value).dtype)


def _new_like(x: Tensor, size: Sequence[int], *value: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _new(size, dtype or x.dtype)


def _arange(func: Any, *numbers: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    made = func(*numbers, dtype=dtype)
    return _new(made.shape, made.dtype)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return _new((*a.shape[:-1], b.shape[-1]), a.dtype)


def _scaled_mm(a: Tensor, b: Tensor, *rest: Any, out_dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    given = rest[4] if len(rest) > 4 else out_dtype  # after two scales, the bias and the scale of the result
    return _new((a.shape[0], b.shape[1]), given or a.dtype)


def _reduced(
    x: Tensor, dim: Sequence[int] | int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dims = [dim] if isinstance(dim, int) else dim or range(x.ndim)
    gone = {d % x.ndim for d in dims} if x.ndim else set()
    return _new([1 if d in gone else n for d, n in enumerate(x.shape) if keepdim or d not in gone], dtype or x.dtype)


def _sum(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    whole = not x.is_floating_point() and not x.is_complex()
    return _reduced(x, dim, keepdim, dtype=dtype or (torch.int64 if whole else x.dtype))


def _aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _reduced(x, dim, keepdim), _reduced(x, dim, keepdim)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    parts = [x for x in tensors if x.shape != (0,)] or tensors[:1]
    shape = list(parts[0].shape)
    shape[dim] = sum(x.shape[dim] for x in parts)
    dtype = tensors[0].dtype
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    return _new(shape, dtype)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return _cat([x.unsqueeze(dim) for x in tensors], dim)


def _same(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return _new(x.shape, x.dtype)


def _gather(x: Tensor, dim: int, index: Tensor, **_: Any) -> Tensor:
    return _new(index.shape, x.dtype)


def _index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    shape = list(x.shape)
    shape[dim] = index.numel()
    return _new(shape, x.dtype)


def _index(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Integers in place of dims that follow each other; other indices by torch's rule."""
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    if not adjacent or any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return aten.index.Tensor(x, indices)
    shape = np.broadcast_shapes(*(index.shape for index in given))
    return _new((*x.shape[: dims[0]], *shape, *x.shape[dims[-1] + 1 :]), x.dtype)


def _embedding(weight: Tensor, indices: Tensor, *_: Any) -> Tensor:
    return _new((*indices.shape, *weight.shape[1:]), weight.dtype)


def _sort(x: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return _pointwise(aten.empty_like.default, x), _pointwise(aten.empty_like.default, x, dtype=torch.int64)


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return _new(x.shape, torch.float32 if half_to_float else x.dtype)


def _softmax_backward(grad: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return _new(grad.shape, dtype)


def _layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    one, scale, shift = (None if y is None else torch.ones(1, dtype=y.dtype) for y in (x, weight, bias))
    small = aten.native_layer_norm.default(one, [1], scale, shift, eps)
    rows = (*x.shape[: x.ndim - len(shape)], *(1 for _ in shape))
    return tuple(_new(size, y.dtype) for size, y in zip((x.shape, rows, rows), small, strict=True))


def _layer_norm_backward(
    grad: Tensor, x: Tensor, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, wanted: Sequence[bool]
) -> Any:
    return tuple(
        _same(y) if want and y is not None else None for y, want in zip((x, weight, bias), wanted, strict=True)
    )


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    b, heads, s, _head_dim = q.shape
    sums = _new((b, s, heads), torch.promote_types(q.dtype, torch.float32)).transpose(1, 2)
    return _pointwise(aten.empty_like.default, q), sums


def _attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=x.dtype, device=META) for x in (q, k, v))


RULES: dict[Any, Rule] = {
    **{func: partial(_pointwise, func) for func in (aten.empty_like.default, aten.zeros_like.default)},
    **{func: partial(_pointwise, func) for func in (aten.ones_like.default, aten.floor_divide.default)},
    **{func: partial(_filled, func) for func in (aten.zeros.default, aten.ones.default)},
    **dict.fromkeys((aten.new_empty.default, aten.new_zeros.default), _new_like),
    **{func: partial(_arange, func) for func in (aten.arange.default, aten.arange.start, aten.arange.start_step)},
    aten.scalar_tensor.default: lambda x, dtype=None, **_: _new((), dtype or torch.tensor(x).dtype),
    aten.mm.default: _mm,
    aten.bmm.default: _mm,
    aten.addmm.default: lambda x, a, b, **_: _mm(a, b),
    aten._grouped_mm.default: lambda a, b, *_, **__: _new((a.shape[0], b.shape[-1]), a.dtype),  # torch: bf16 only
    aten._scaled_mm.default: _scaled_mm,
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.dim: _reduced,
    aten.amax.default: _reduced,
    aten.logsumexp.default: _reduced,
    aten.aminmax.default: _aminmax,
    aten._unsafe_view.default: aten.view.default,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.roll.default: _same,
    aten.gather.default: _gather,
    aten.scatter_add.default: _same,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.searchsorted.Tensor: lambda edges, x, *, out_int32=False, **_: _new(
        x.shape, torch.int32 if out_int32 else torch.int64
    ),
    aten.sort.stable: _sort,
    aten.slice_backward.default: lambda grad, size, *_: _new(size, grad.dtype),
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: lambda grad, indices, rows, *_: _new((rows, grad.shape[-1]), grad.dtype),
    aten._softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
