"""16-bit matrix products computed in fp32, for CPUs that lack 16-bit matrix instructions.

Without these instructions, torch's own 16-bit kernels take up to fifty times as long as an fp32 product. Operands are
cast to fp32 and results are rounded once, as in torch's kernels. This module replaces operators of torch, so that the
code of layers, backward passes, compiled regions and extensions stays unchanged.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor
from torch.library import Library, get_kernel

from megatron.core.config.optimizers import OPTIMIZERS
from megatron.core.dist_checkpointing.storage import ranks_without
from megatron.core.parallel_state import Axis
from megatron.core.torch_private import matmul_instructions
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback
from megatron.training.initialize import Runtime

_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"

_OPERANDS = {"mm": 2, "bmm": 2, "addmm": 3, "baddbmm": 3, _ATTENTION: 3, f"{_ATTENTION}_backward": 5}
"""Number of tensor operands for each replaced operator. These operands are the operator's first arguments, and must
have the same dtype."""

_VARIANTS = {"mm": "mm.out", "bmm": "bmm.out"} | {name: f"{name}.out {name}_" for name in ("addmm", "baddbmm")}
"""Names of the operator variants that write their result into existing memory, keyed by operator."""

_FEW_ROWS = 4
"""Maximum number of rows of x for which torch's own 16-bit kernel computes the product x Wᵀ. Products with few rows
occur during text generation. For such products, torch's kernel is at least as fast as a product in fp32, because it
reads W only once and in 16 bits."""

_replaced: set[torch.dtype] = set()
"""Dtypes whose matrix products this process computes in fp32. The set applies to the whole process because torch's
operators are process-wide."""


def has_products_of(dtype: torch.dtype) -> bool:
    """Return True if this CPU has instructions for products of a 16-bit `dtype` and torch uses these instructions."""
    return torch.backends.mkldnn.is_available() and matmul_instructions(dtype)


def multiply_in_fp32(dtype: torch.dtype) -> None:
    """Make this process compute matrix products and attention of `dtype` in fp32 on CPUs."""
    _replace_operators()
    _replaced.add(dtype)


Results = Tensor | tuple[Tensor, ...]

Kernel = Callable[..., Results]
"""Implementation of an operator, which is called with a dispatch key set and the operands."""


@cache
def _replace_operators() -> Library:
    """Replace torch's operators. The replacement lasts until the returned object is deleted. Each call to a replaced
    operator takes about 1.5 microseconds longer."""
    library = Library("aten", "IMPL", "CPU")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name, operands in _OPERANDS.items():
            product = get_kernel(f"aten::{name}", "CPU").call_boxed
            for each in (name, *_VARIANTS.get(name, "").split()):
                own = get_kernel(f"aten::{each}", "CPU").call_boxed
                library.impl(each, _in_fp32(own, product, operands, each.endswith("_")), with_keyset=True)
    return library


def _in_fp32(own: Kernel, product: Kernel, operands: int, in_place: bool) -> Kernel:
    """Return a kernel that casts operands to fp32 and calls `product` if their dtype is in `_replaced`. Otherwise, the
    kernel calls `own`, torch's kernel."""

    def run(keys: object, *args: Tensor, **kwargs: Tensor | None) -> Results:
        dtype, out = args[0].dtype, args[0] if in_place else kwargs.get("out")
        if dtype not in _replaced or _few_rows(*args[operands - 2 : operands]):
            return own(keys, *args, **kwargs)
        if any(x.dtype != dtype for x in (*args[:operands], *(() if out is None else (out,)))):
            return own(keys, *args, **kwargs)  # torch's own kernel reports unequal dtypes
        if (mask := kwargs.get("attn_mask")) is not None:
            kwargs["attn_mask"] = mask.float()
        kwargs.pop("out", None)
        found = product(keys, *(x.float() for x in args[:operands]), *args[operands:], **kwargs)
        if out is not None and isinstance(found, Tensor):
            return out.resize_(found.shape).copy_(found)
        if isinstance(found, Tensor):
            return found.to(dtype)
        # Attention returns outputs [b, heads, n, d] and log-sum-exps [b, heads, n]. The log-sum-exps stay in fp32.
        return tuple(x.to(dtype) if x.ndim == 4 else x for x in found)

    return run


def _few_rows(x: Tensor, matrix: Tensor) -> bool:
    return matrix.ndim == 2 and x.shape[0] <= _FEW_ROWS and matrix.stride(0) == 1


def choose_products(dtypes: Iterable[torch.dtype], device: torch.device, world: Axis) -> list[str]:
    """For each 16-bit dtype, compute matrix products in fp32 if the CPU of any rank lacks matrix instructions for the
    dtype. All ranks make the same choice, because replicas must stay equal. Returns the lines to log. Collective over
    `world`."""
    lines = []
    for dtype in dtypes:
        if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
            continue
        if lacking := ranks_without(has_products_of(dtype), world):
            multiply_in_fp32(dtype)
            name = str(dtype).removeprefix("torch.")
            lines.append(f"matrix products of {name} are computed in fp32: no instructions for them on {lacking}")
    return lines


def multiplied_dtypes(config: RunConfig) -> list[torch.dtype]:
    """Return the dtypes of matrix products in the layers and in the optimizer."""
    of_updates = OPTIMIZERS.facts(config.optimizer.optimizer).product_dtypes
    names = [config.parallel.params_dtype, *of_updates(config.optimizer, config.parallel.main_dtype)]
    return [getattr(torch, name) for name in dict.fromkeys(names)]


class ProductsInFp32(Callback):
    """Callback that calls `choose_products` before the model is built."""

    def on_setup(self, runtime: Runtime) -> None:
        for line in choose_products(multiplied_dtypes(self.config), runtime.device, runtime.state.world):
            runtime.say(f" {line}")
