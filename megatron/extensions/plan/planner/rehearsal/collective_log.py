"""Log of a rank's collectives, which are recorded when torch dispatches them. The process groups may be real or fake.

The log covers all callers: this library, torch's own functions, and custom layers. A collective of Python objects is
recorded as one call, because the sizes of its messages depend on values.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache
from inspect import signature
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel_state import Axis
from megatron.core.torch_private import default_group, known_groups, schema_of
from megatron.extensions.plan.planner.live_memory import tensors_of
from megatron.extensions.plan.planner.rehearsal.matching import Collective, Group, Splits
from megatron.training.foreign import replaced

LIBRARY = Path(__file__).resolve().parents[4]

OPS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter"),
    *("send", "recv", "barrier", "monitored_barrier"),
)
"""Names of collectives in records. If underscores are ignored, the name of an operator starts with the name of its
collective: `_allgather_base_` is an `all_gather`."""

REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
"""Names of reduction operations, in the order of torch's ReduceOp."""

SENT = ("tensors", "input_tensors", "input_tensor", "input", "inputs")
RECEIVED = ("output_tensors", "output_tensor", "output", "outputs", "tensors", "out")

OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")

WRAPPERS = ("core/collectives.py", "core/pipeline_parallel/p2p.py")
"""Files of this library that are skipped in the search for the call site of a collective. The planner's files are also
skipped."""


class CollectiveLog:
    """Collectives of this rank, in order. `phase` is a function that returns the rank's current phase and micro-batch
    number (-1 outside of passes)."""

    def __init__(self, phase: Callable[[], tuple[str, int]] = lambda: ("", -1)) -> None:
        self.collectives: list[Collective] = []
        self.axes: dict[Group, str] = {}
        self.phase = phase
        self._groups: dict[str, Group] = {}

    def name_groups(self, axes: Mapping[str, Axis]) -> None:
        """Record the axis name of each process group of a layout.

        If several axes have the same ranks, their group is named after the first of these axes. Axes that apply only to
        experts come last.
        """
        for name, axis in sorted(axes.items(), key=lambda item: item[0].startswith("expt_")):
            if axis.group is not None:
                self.axes.setdefault(self.group(axis.group), name.partition("_lane")[0])

    def group(self, group: dist.ProcessGroup | str) -> Group:
        """Return the `Group` (members and ordinal) of a process group, which is passed as an object or by its name."""
        name = group if isinstance(group, str) else group.group_name
        if name not in self._groups:
            self._groups.clear()
            before: Counter[tuple[int, ...]] = Counter()
            for each, ranks in known_groups().pg_group_ranks.items():
                members = tuple(sorted(ranks))
                self._groups[each.group_name] = Group(members, before[members])
                before[members] += 1
        return self._groups[name]

    def add(self, made: Collective) -> None:
        """Record a collective, with its call site and the current phase."""
        phase, microbatch = self.phase()
        self.collectives.append(made._replace(site=call_site(), phase=phase, microbatch=microbatch))

    def record(self, func: Any, args: Any, kwargs: Any) -> None:
        """Record an operator call if the operator is a collective."""
        if func.namespace not in ("c10d", "_c10d_functional"):
            return
        schema = schema_of(func)
        name = schema.name.partition("::")[2].replace("_", "")
        op = next((op for op in OPS if name.startswith(op.replace("_", ""))), None)
        if op is None:
            return
        op = op.removeprefix("monitored_")
        given = dict(zip((each.name for each in schema.arguments), args, strict=False)) | kwargs
        sent, received = (tensors_of([given.get(name) for name in names]) for names in (SENT, RECEIVED))
        sizes = [sum(x.numel() for x in tensors) for tensors in (sent, received)]
        if func.namespace == "c10d":
            group = self.group(dist.ProcessGroup.unbox(given["process_group"]))
        else:  # this is a functional collective, which allocates its result
            group, received = self.group(given["group_name"]), []
            up, down = {"all_gather": (len(group.ranks), 1), "reduce_scatter": (1, len(group.ranks))}.get(op, (1, 1))
            sizes[1] = sizes[0] * up // down
        made = Collective(op, group, "", 0, 0)
        if op == "all_to_all":
            made = made._replace(splits=_splits(name, given, sent, received, sizes))
        elif op in ("send", "recv"):
            peer = given.get("dst", given.get("src", -1))
            made = made._replace(peer=group.ranks[peer] if peer >= 0 else -1, tag=given["tag"])
            sizes[op == "send"] = 0
        elif "root_rank" in given or "src" in given:
            made = made._replace(peer=group.ranks[given.get("root_rank", given.get("src"))])
        if "reduce_op" in given:
            made = made._replace(reduce=_reduction(given["reduce_op"]))
        if op != "barrier":
            dtype = (sent or received)[0].dtype
            made = made._replace(dtype=str(dtype).removeprefix("torch."), itemsize=dtype.itemsize)
            made = made._replace(sent=sizes[0], received=sizes[1])
        self.add(made)

    def objects(self) -> AbstractContextManager[None]:
        """Context manager that also records collectives of Python objects, and fills in their results."""

        def recorded(name: str, real: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **kwargs: object) -> None:
                given = signature(real).bind(*args, **kwargs).arguments
                peer = -1 if name == "all_gather_object" else given.get("src", given.get("dst")) or 0
                self.add(Collective(name, self.group(given.get("group") or default_group()), "", 0, 0, peer=peer))
                self.answer(real, given)

            return call

        return replaced(*((dist, name, recorded(name, getattr(dist, name))) for name in OBJECTS))

    def answer(self, real: Callable[..., Any], given: Mapping[str, Any]) -> None:
        """Fill in the result of a collective of Python objects (`real`) as if every rank passed the same value as this
        rank."""
        if "obj" in given and (values := given.get("object_list", given.get("object_gather_list"))) is not None:
            values[:] = [given["obj"]] * len(values)
        if given.get("scatter_object_input_list"):
            given["scatter_object_output_list"][0] = given["scatter_object_input_list"][0]


def _splits(name: str, given: dict[str, Any], sent: list[Tensor], received: list[Tensor], sizes: list[int]) -> Splits:
    if name == "alltoall":
        return Splits(tuple(x.numel() for x in sent), tuple(x.numel() for x in received))
    out, into = given.get("input_split_sizes") or (), given.get("output_split_sizes") or ()
    row = sizes[0] // sum(out) if sum(out) else sizes[1] // sum(into) if sum(into) else 1
    return Splits(tuple(n * row for n in out), tuple(n * row for n in into))


def _reduction(op: object) -> str:
    if isinstance(op, str):
        return op
    number = op.op() if hasattr(op, "op") else -1
    return REDUCTIONS[number] if isinstance(number, int) and 0 <= number < len(REDUCTIONS) else ""


def call_site() -> str:
    """Return `FILE:LINE in FUNCTION` of the innermost caller outside torch and the wrappers of collectives."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if (place := _place(code.co_filename)) is not None:
            return f"{place}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def places_of(trace: TracebackType | None) -> Iterator[str]:
    """Yield the code locations of a traceback, innermost first. Locations in torch and in the wrappers of collectives
    are omitted."""
    for frame, line in reversed(list(traceback.walk_tb(trace))):
        if (place := _place(frame.f_code.co_filename)) is not None:
            yield f"{place}:{line} in {frame.f_code.co_name}"


@cache
def _place(filename: str) -> str | None:
    """Return the path of a file as it appears in call sites; None if the file is omitted from call sites."""
    path = Path(filename)
    if "site-packages" in path.parts or filename.startswith("<") or any(path.is_relative_to(each) for each in PASSED):
        return None
    if path.is_relative_to(LIBRARY):
        inside = str(path.relative_to(LIBRARY))
        return None if inside in WRAPPERS or path.is_relative_to(PLANNER) else f"{LIBRARY.name}/{inside}"
    return filename


PLANNER = Path(__file__).parents[1]

PASSED = (Path(torch.__file__).parent, Path(sysconfig.get_path("stdlib")))
"""Folders whose files are omitted from call sites: torch and Python's standard library."""
