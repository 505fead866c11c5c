"""Fake tensors: tensors of the CPU with shapes, storages and a graph, but no memory and no values.

Autograd and composite functions take a fake tensor for one of the CPU. The operators below them run on torch's meta
device, which computes shapes alone. torch's own `FakeTensorMode` serves its compiler, and imports it and symbolic
shapes, which takes longer than to import torch; `megatron.planner.shape_rules` keeps the meta device from doing so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from megatron.planner.shape_rules import rule_of

CPU, META = torch.device("cpu"), torch.device("meta")
aten = torch.ops.aten

Observer = Callable[[Any, Any, Any, Any], object]
"""Takes an operator that has run, its arguments, its keyword arguments and its result."""


class FakeTensor(Tensor):
    """A tensor of the CPU that shares its storage with `on_meta`, a tensor of the meta device."""

    on_meta: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, on_meta: Tensor) -> FakeTensor:
        fake = Tensor._make_subclass(cls, on_meta, False, dispatch_device=True, device_for_backend_keys=CPU)
        torch._C._set_throw_on_mutable_data_ptr(fake)
        fake.on_meta = on_meta
        return fake

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run_without_values(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Any) -> None:
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.on_meta = other.on_meta

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FakeTensor({tuple(self.shape)}, {self.dtype})"


class FakeTensors(TorchDispatchMode):
    """A context in which every new tensor is a fake one. Observers see each operator that has run."""

    def __init__(self) -> None:
        super().__init__()
        self._observers: list[Observer] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports its compiler to tell it to leave this class alone

    @contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """Calls `observer` after each operator."""
        self._observers.append(observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = run_without_values(func, args, kwargs)
        for observe in self._observers:
            observe(func, args, kwargs, out)
        return out


def run_backward(output: Tensor | GradientEdge, grad: Tensor) -> None:
    """`torch.autograd.backward`, which compares shapes as symbolic ones and imports these, from torch's engine."""
    Variable._execution_engine.run_backward((output,), (grad,), False, False, (), True, True)


def run_without_values(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operator on fake tensors. A number that it reads from one is 0."""
    if func is torch.ops.prim.device.default:
        return CPU
    if func is aten._local_scalar_dense.default:
        return 0.0 if args[0].is_floating_point() else 0
    given: dict[int, FakeTensor] = {}

    def to_meta(x: Any) -> Any:
        if isinstance(x, FakeTensor):
            given[id(x.on_meta)] = x
            return x.on_meta
        if isinstance(x, Tensor):  # of numbers, as torch.tensor() makes it
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=META)
        return META if isinstance(x, torch.device) else x

    def to_fake(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return given[id(x)] if id(x) in given else FakeTensor(x)

    on_meta, options = tree_map(to_meta, args), tree_map(to_meta, kwargs)
    if not given and _takes_device(func):
        options["device"] = META
    try:
        out = rule_of(func)(*on_meta, **options)
    except NotImplementedError:
        out = _run_on_zeros(func, args, kwargs)
    if torch.Tag.inplace_view in func.tags:  # the shape of the meta tensor has changed
        args[0].data = FakeTensor(on_meta[0])
    return tree_map(to_fake, out)


@cache
def _takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _run_on_zeros(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operator that the meta device lacks, as one of an extension may be, on real zeros."""
    if torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags:
        raise NotImplementedError(f"the result of {func} depends on values, and a plan has none")

    def zeros(x: Any) -> Any:
        return torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, Tensor) else x

    out = func(*tree_map(zeros, args), **tree_map(zeros, kwargs))
    return tree_map(lambda x: x.to(META) if isinstance(x, Tensor) else x, out)
