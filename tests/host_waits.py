"""Detect calls in this thread that would make the host wait for a GPU or a GPU wait for the host. The detection works
on any device.

`HostWaits` lists three kinds of calls. Calls of the first kind, such as `item`, read tensor values into Python. Calls
of the second kind return tensors whose shapes depend on tensor values, which torch must read from the device. Calls of
the third kind create tensors from Python numbers; copying these tensors to a device blocks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import megatron

PRODUCT = str(Path(megatron.__path__[0]))

OPERATIONS = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_static", "masked_select"),
    *("unique_dim", "_unique", "_unique2", "unique_consecutive", "bincount", "repeat_interleave"),
    *("lift_fresh", "lift_fresh_copy"),
}
"""Names of operations in torch.ops.aten. For repeat_interleave, only the overload that accepts the repeats as a tensor
is meant."""

METHODS = ("tolist", "numpy", "cpu")
"""Tensor methods that read values but do not dispatch one of the recorded operations, or only dispatch it for tensors
on a device."""


class HostWaits(TorchDispatchMode):
    """Dispatch mode that records in `found` every call that could wait, in the form `file:function what`. The recorded
    function is the innermost library function on the call stack. Calls within the functions named in `ignored` do not
    count. `calls` counts all torch operations by name."""

    def __init__(self, ignored: Iterable[str] = ()) -> None:
        super().__init__()
        self.ignored = frozenset(ignored)
        self.found: list[str] = []
        self.calls: Counter[str] = Counter()
        self._patches = ExitStack()

    def __enter__(self) -> HostWaits:
        for name in METHODS:
            self._patches.enter_context(mock.patch.object(Tensor, name, self._recording(name)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            name = func.overloadpacket.__name__
            self.calls[name] += 1
            if name in OPERATIONS or (name.startswith("index") and _indexed_by_mask(args)):
                self._note(name)
        return func(*args, **(kwargs or {}))

    def _recording(self, name: str) -> Callable[..., Any]:
        original = getattr(Tensor, name)

        def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._note(name)
            return original(tensor, *args, **kwargs)

        return method

    def _note(self, what: str) -> None:
        frame, place = sys._getframe(1), None
        while frame is not None:
            code = frame.f_code
            if code.co_name in self.ignored:
                return
            if place is None and code.co_filename.startswith(PRODUCT):
                place = f"{Path(code.co_filename).name}:{code.co_name}"
            frame = frame.f_back  # type: ignore[assignment]
        self.found.append(f"{place} {what}")


def _indexed_by_mask(args: Any) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)
