"""Gradients of biases and norms, added to `main_grad` many at a time: each alone is a launch of its own on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.tensor_parallel.weight_grad import is_stale, mark_stale

LARGEST = 2**16
"""Elements of a gradient that is held."""

AT_A_TIME = 256


class SmallGrads:
    """Holds small gradients that autograd brings. A step must `flush` them before it reads any `main_grad`."""

    def __init__(self) -> None:
        self.enabled = False
        self._held: dict[int, tuple[Tensor, Tensor]] = {}
        """(parameter, gradient) by the parameter's id: a second gradient of one is added after the first."""

    def takes(self, param: Tensor, grad: Tensor) -> bool:
        """Whether a gradient is to be held: one whose arrival nobody waits for."""
        return self.enabled and grad.numel() <= LARGEST and getattr(param, "on_main_grad", None) is None

    def hold(self, param: Tensor, grad: Tensor) -> None:
        if id(param) in self._held or len(self._held) == AT_A_TIME:
            self.flush()
        self._held[id(param)] = param, grad

    def drop(self) -> None:
        """Forgets what is held."""
        self._held.clear()

    @torch.no_grad()
    def flush(self) -> None:
        """Adds what is held to its `main_grad`s, or writes it over those that are stale."""
        by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for param, grad in self._held.values():
            by_dtype.setdefault(grad.dtype, []).append((param, grad))
        self._held.clear()
        for held in by_dtype.values():
            _accumulate(held)


def _accumulate(held: Sequence[tuple[Tensor, Tensor]]) -> None:
    """The gradients have one dtype, and `main_grad`s have one."""
    main_dtype = held[0][0].main_grad.dtype  # type: ignore[attr-defined]
    joined = torch.cat([grad.reshape(-1) for _, grad in held]).to(main_dtype)
    parts = joined.split([grad.numel() for _, grad in held])
    stale = [is_stale(param) for param, _ in held]
    for writes, accumulate_ in ((True, torch._foreach_copy_), (False, torch._foreach_add_)):
        which = [number for number, old in enumerate(stale) if old is writes]
        if which:
            mains = [held[number][0].main_grad.view(-1) for number in which]  # type: ignore[attr-defined]
            accumulate_(mains, [parts[number] for number in which])
    for param, _ in held:
        mark_stale(param, False)
