"""The kernels of a training step on fake CUDA tensors: what each reads, writes and multiplies.

Operations outside compiled regions are counted by a dispatch mode, one kernel each: a tensor is read or written once,
views are free. Compiled regions are compiled by Dynamo, AOTAutograd and Inductor as on a GPU, up to the code of the
kernels; Inductor's scheduler says what each kernel reads and writes.
"""

from __future__ import annotations

import copy
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron.core import compiled_regions
from tools.bench.kernel_groups import AttentionWork, Gemm, Kernel, group_of_op, group_of_region

LIBRARY = str(Path(compiled_regions.__file__).parents[1])
"""Folder of the package `megatron`."""

PROGRAMS = 132
"""Rows that the kernel of losses and their gradients has in work: one on each multiprocessor of a large GPU."""

FREE = (
    "empty empty_like empty_strided new_empty new_empty_strided detach alias lift_fresh _local_scalar_dense "
    "device is_same_size record_stream set_ resize_ prim_layout sym_size sym_stride sym_numel sym_storage_offset"
).split()
"""Operations without a kernel."""

WRITES_ONLY = "copy_ fill_ zero_ normal_ uniform_ random_ _foreach_zero_ _foreach_copy_".split()
"""In-place operations that do not read what they overwrite."""

INDEXED = "embedding gather index index_select index_put_ _index_put_impl_ index_add_ scatter_ take_along_dim".split()
"""Operations that touch only some elements of their first tensor."""


def size_of(x: Tensor) -> int:
    """Bytes of the distinct elements of `x`."""
    elements = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return elements * x.element_size()


def _tensors(values: Any) -> list[Tensor]:
    """The tensors on the device, each once."""
    found = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.device.type == "cuda")
    return list({id(leaf): leaf for leaf in found}.values())


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


@dataclass
class RegionUse:
    """One compiled region."""

    name: str
    calls: int = 0
    compilations: int = 0
    """Graphs compiled, forward and backward ones apart."""

    eager_calls: int = 0
    """Calls in which no compiled graph ran: Dynamo gave up, as beyond its limit of variants."""


@dataclass
class Trace:
    """What ran."""

    kernels: Counter[Kernel] = field(default_factory=Counter)
    regions: dict[str, RegionUse] = field(default_factory=dict)

    def restart(self) -> None:
        """Forgets the kernels."""
        self.kernels = Counter()


def site() -> tuple[str, str]:
    """(file, function) of the innermost call within the library."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(LIBRARY) and "/fusions/kernels/" not in name:
            return name[len(LIBRARY) + 1 :], frame.f_code.co_name
        frame = frame.f_back
    return "", ""


class KernelCounter(TorchDispatchMode):
    """Adds the kernels of operations to a trace."""

    def __init__(self, trace: Trace, cache: int, attention: str | None = None) -> None:
        """`cache`: bytes of the device's L2 cache. `attention`: the kernel whose speed counts, else that of the
        operation."""
        super().__init__()
        self.cache = cache
        self.attention = attention
        self.trace, self.quiet, self.active = trace, False, False
        self.main_grads: set[int] = set()
        """Storages of the gradient buffers."""

        self.fp8 = False

    def __enter__(self) -> KernelCounter:
        self.active = True
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        self.active = False
        super().__exit__(*args)

    def prepare(self, modules: Iterable[nn.Module], fp8: bool) -> None:
        """Learns which storages are gradient buffers."""
        grads = (getattr(parameter, "main_grad", None) for module in modules for parameter in module.parameters())
        self.main_grads, self.fp8 = {_storage(grad) for grad in grads if grad is not None}, fp8

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.quiet:
            self._count(func, args, kwargs, out)
        return out

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        name = func._overloadpacket.__name__
        given, made = _tensors((args, kwargs)), _tensors(out)
        if name in FREE or not (given or made) or "sym_" in name:
            return
        mutated = _mutated(func, args, kwargs)
        if not mutated and made and {_storage(x) for x in made} <= {_storage(x) for x in given}:
            return  # views
        kernels = self._special(func, name, args, kwargs, given, made)
        if kernels is None:
            if name in INDEXED:
                adds = "add" in name or kwargs.get("accumulate", "index_put" in name and len(args) > 3 and args[3])
                read, written = _indexed(given, made, mutated, adds)
            else:
                overwritten = {id(x) for x in mutated} if name in WRITES_ONLY or "out" in kwargs else set()
                read = sum(size_of(x) for x in given if id(x) not in overwritten)
                written = sum(size_of(x) for x in _tensors((mutated, made)))
            where = site()
            group = group_of_op(func.namespace, name, where)
            if name == "add_" and _storage(args[0]) in self.main_grads:
                group = "fp8 weight-gradient adds" if self.fp8 else "weight-gradient sums"
            # Sizes in the optimizer depend on the number of layers.
            shape = "" if group == "optimizer" else f" {_shown((made or given)[0])}"
            if func.namespace == "megatron" and any(x.element_size() == 1 for x in made):
                group = group if group == "fp8 transposes" else "fp8 casts"
            kernels = [Kernel(group, f"{name}{shape} ({where[0]})", read, written)]
            if name == "norm_gradients":
                kernels.append(Kernel(group, f"{name}: sums of programs", 0, 0))
        self.trace.kernels.update(kernels)

    def _special(
        self, func: Any, name: str, args: Any, kwargs: dict[str, Any], given: list[Tensor], made: list[Tensor]
    ) -> list[Kernel] | None:
        """The kernels of products, attention, norms and fused optimizers."""
        if name in PRODUCTS:
            a, b = PRODUCTS[name](args)
            return list(_product(name, a, b, args, kwargs, made[0]))
        if name in ADDED_PRODUCTS:
            out, a, b = ADDED_PRODUCTS[name](args)
            return list(_product(name, a, b, args, kwargs, out))
        if name == "residual_gemm":
            return list(_product(name, args[0], args[1].t(), args, kwargs, made[0]))
        if name == "loss_and_gradient_":
            whole = size_of(args[0])
            again = whole if whole // len(args[0]) * PROGRAMS > self.cache else 0  # else from the cache
            read, written = whole + again + size_of(args[1]), whole + size_of(made[0])
            return [Kernel("loss", f"{name} {_shown(args[0])}", read, written)]
        if name == "scale_rows_":  # of losses of a weight of 1, as in pretraining, none
            return [Kernel("loss", name, size_of(args[1]), 0)]
        if name == "clear_rows_behind_":  # only the device knows how few there are
            return [Kernel("experts", name, 0, 0)]
        if "scaled_dot_product" in name or "flash_attention" in name:
            return [_attention(self.attention or ("cudnn" if "cudnn" in name else "flash"), name, args, given, made)]
        if "norm" in name and name.endswith("_backward"):
            # One kernel for the input's gradient; two, of which the second is small, for those of the parameters.
            grad, x = (size_of(each) for each in given[:2])
            small = sum(size_of(each) for each in given[2:])
            shape = _shown(given[0])
            return [
                Kernel("norm", f"{name} {shape}", grad + x + small, size_of(made[0])),
                Kernel("norm", f"{name} of gamma {shape}", grad + x + small, sum(map(size_of, made[1:])), launches=2),
            ]
        if name.startswith("_fused_adam"):
            params, grads, *states = (args[i] for i in range(5))
            changed = sum(size_of(x) for x in _tensors((params, states)))
            of_grads = sum(size_of(x) for x in _tensors(grads))
            scaled = kwargs.get("grad_scale") is not None
            return [Kernel("optimizer", name, changed + of_grads, changed + of_grads * scaled)]
        return None


def _shown(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}[{','.join(map(str, x.shape))}]"


def _mutated(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Arguments that an operation writes."""
    found: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return _tensors(found)


def _indexed(given: list[Tensor], made: list[Tensor], mutated: list[Tensor], adds: bool) -> tuple[int, int]:
    """(bytes read, bytes written) of an operation that touches some rows only, and `adds` to them where it writes."""
    others = sum(size_of(x) for x in given[1:])
    if not mutated:
        written = sum(size_of(x) for x in made)
        return written + others, written
    rows = max((size_of(x) for x in given[1:] if x.is_floating_point()), default=0)
    return others + rows * adds, rows


PRODUCTS: dict[str, Callable[[Any], tuple[Tensor, Tensor]]] = {
    **dict.fromkeys(
        ("mm", "bmm", *(f"{kind}_mm{v}" for kind in ("_scaled", "_grouped", "_scaled_grouped") for v in ("", "_v2"))),
        lambda args: args[:2],
    ),
    **dict.fromkeys(("addmm", "addmm_", "baddbmm", "baddbmm_"), lambda args: args[1:3]),
}
"""Name -> the two factors among the arguments."""

ADDED_PRODUCTS: dict[str, Callable[[Any], tuple[Tensor, Tensor, Tensor]]] = {
    "add_grouped_products_": lambda args: (args[0], args[1].t(), args[2]),
    "add_fp8_product_": lambda args: (args[0], args[1], args[2].t()),
}
"""Kernels of our own: name -> their sums, and the two factors."""


def _product(name: str, a: Tensor, b: Tensor, args: Any, kwargs: dict[str, Any], out: Tensor) -> Iterator[Kernel]:
    """A GEMM, and apart from it the sums that it adds to."""
    batches, (m, k), n = 1, a.shape[-2:], b.shape[-1]
    if name in ("bmm", "baddbmm", "baddbmm_"):
        batches = a.shape[0]
    elif "grouped" in name:
        batches = b.shape[0] if b.ndim == 3 else out.shape[0]
        if a.ndim == 2 and b.ndim == 3:
            m //= batches
        elif a.ndim == 2:
            k //= batches
    precision = {1: "fp8", 2: "bf16"}.get(a.element_size(), "fp32")
    sums = name.endswith("_") or kwargs.get("out") is args[0]
    read = size_of(a) + size_of(b)
    if name.startswith(("addmm", "baddbmm")) and not sums:
        read += size_of(args[0])  # the bias
    if name == "residual_gemm" and args[3] is not None:
        read += size_of(args[3])  # the bias
    shape = f"{batches} x " * (batches > 1) + f"{m} x {n} x {k}"
    written = 0 if sums else size_of(out)
    yield Kernel("GEMMs", f"{precision} {shape}", read, written, Gemm(precision, batches, m, n, k))
    if name == "residual_gemm":
        yield Kernel("residual addends", f"addend {_shown(args[2])}", size_of(args[2]), 0, launches=0)
    if sums:
        whole, adds = size_of(out), _adds(name, args, kwargs)
        text = f"beta = {adds:d} {_shown(out)}"
        yield Kernel("weight-gradient sums", text, whole * adds, whole, launches=0)


def _adds(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a product is added to its output, else written over it."""
    if name == "add_fp8_product_":
        return not (args[6] if len(args) > 6 else kwargs.get("overwrite", False))
    return bool(kwargs.get("beta", 1))


def _attention(kernel: str, name: str, args: Any, given: list[Tensor], made: list[Tensor]) -> Kernel:
    """Causal attention by a fused kernel."""
    backward = name.endswith("backward")
    q, k, v = args[1:4] if backward else args[:3]  # [b, heads, s, d]
    batch, heads, length, width = q.shape
    pairs = batch * heads * length * k.shape[2] / 2
    flops = 2 * pairs * (3 * width + 2 * v.shape[3] if backward else width + v.shape[3])
    read, written = sum(map(size_of, given)), sum(map(size_of, made))
    text = f"{kernel} {'backward' if backward else 'forward'} {_shown(q)}"
    return Kernel("attention", text, read, written, AttentionWork(kernel, flops, width, length, backward))


@contextmanager
def counted_regions(trace: Trace, counter: KernelCounter, mode: FakeTensorMode) -> Iterator[None]:
    """Compiled regions count the kernels that Inductor makes of them, and run on fake tensors."""
    known: dict[tuple[Any, bool], Callable[..., Any]] = {}

    def compiled(function: Callable[..., Any], static: bool = False) -> Callable[..., Any]:
        if (function, static) not in known:
            known[function, static] = _CountedRegion(function, static, trace, counter, mode).wrapped()
        return known[function, static]

    limit = max(torch._dynamo.config.recompile_limit, compiled_regions.RECOMPILE_LIMIT)
    with (
        mock.patch.object(compiled_regions, "_compiled", compiled),
        torch._dynamo.config.patch(recompile_limit=limit),
    ):
        yield


class _CountedRegion:
    """torch.compile of a region with a backend that charges Inductor's kernels at each call."""

    def __init__(
        self, function: Callable[..., Any], static: bool, trace: Trace, counter: KernelCounter, mode: FakeTensorMode
    ) -> None:
        self.function, self.trace, self.counter, self.mode = function, trace, counter, mode
        name = f"{function.__module__.removeprefix('megatron.core.')}.{function.__qualname__}"
        self.use = trace.regions.setdefault(name, RegionUse(name))
        self.group = group_of_region(name)
        self.ran = False
        self.compiled = torch.compile(function, backend=self._backend, dynamic=False if static else None)

    def wrapped(self) -> Callable[..., Any]:
        @wraps(self.function)
        def run(*args: Any) -> Any:
            self.use.calls += 1
            self.ran = False
            with _disable_current_modes():
                out = self.compiled(*args)
            if self.ran:
                return out
            self.use.eager_calls += 1
            return self.function(*args)

        return run

    def _backend(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from torch._inductor import compile_fx

        return compile_fx.compile_fx(module, inputs, inner_compile=self._compile)

    def _compile(self, module: torch.fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        """Stands in for Inductor's inner compiler: (graph after autograd, example inputs) -> what runs it."""
        self.use.compilations += 1
        direction = "backward" if settings.get("is_backward") else "forward"
        kernels = [
            replace(kernel, group=self.group, name=f"{self.use.name} {direction}: {kernel.name}")
            for kernel in inductor_kernels(copy.deepcopy(module), inputs, settings, self.counter.cache)
        ]

        def run(inputs: list[Any]) -> Any:
            self.ran = True
            given = list(inputs)
            inputs.clear()
            quiet, self.counter.quiet = self.counter.quiet, True
            try:
                with self.mode:
                    out = module(*given)
            finally:
                self.counter.quiet = quiet
            if self.counter.active and not quiet:
                self.trace.kernels.update(kernels)
            return out

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


class _Generated(BaseException):
    """Ends a compilation when its kernels are known."""

    def __init__(self, kernels: list[Kernel]) -> None:
        self.kernels = kernels


def inductor_kernels(
    module: torch.fx.GraphModule, inputs: Sequence[Any], settings: dict[str, Any], cache: int
) -> list[Kernel]:
    """The kernels that Inductor generates for a graph, on a device with `cache` bytes of L2 cache."""
    from torch._inductor import config
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.compile_fx import _InProcessFxCompile
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    sources: dict[frozenset[str], tuple[str, Any]] = {}
    define = TritonScheduling.define_kernel

    def define_kernel(scheduling: Any, source: str, nodes: Any, kernel: Any) -> Any:
        names = frozenset(node.get_name() for node in nodes if hasattr(node, "get_name"))
        sources[names] = source, kernel
        return define(scheduling, source, nodes, kernel)

    def generate(graph: Any) -> Any:
        graph.codegen()
        made = (_of_node(node, sources, cache) for node in graph.scheduler.nodes)
        raise _Generated([kernel for kernel in made if kernel is not None])

    given = {"cudagraphs": BoxedBool(False), "is_inference": False, **settings}
    with (
        mock.patch.object(TritonScheduling, "define_kernel", define_kernel),
        mock.patch.object(GraphLowering, "compile_to_module", generate),
        config.patch(force_disable_caches=True, compile_threads=1),
        V.set_debug_handler(DebugContext()),
    ):
        try:
            _InProcessFxCompile().codegen_and_compile(module, inputs, (), given)
        except _Generated as found:
            return found.kernels
    raise AssertionError("Inductor generated no module")


def _of_node(node: Any, sources: dict[frozenset[str], tuple[str, Any]], cache: int) -> Kernel | None:
    """A kernel of Inductor's scheduler."""
    from torch._inductor.scheduler import NopKernelSchedulerNode
    from torch._inductor.utils import get_fused_kernel_name
    from torch._inductor.virtualized import V

    from tools.bench.kernel_reads import distinct_reads

    if isinstance(node, NopKernelSchedulerNode):
        return None
    reads, writes, both = (
        node.get_read_write_buffer_accesses(include_reads=reads, include_writes=writes)
        for reads, writes in ((True, False), (False, True), (True, True))
    )
    # What a kernel writes itself, or does not even write, it has in registers.
    reads = {buffer: size for buffer, size in reads.items() if buffer in both and buffer not in writes}
    if not node.is_extern() and (found := distinct_reads(node.get_nodes())):
        for buffer, size in reads.items():
            elements = found.get(buffer, 0.0)  # a buffer that is only written over is not loaded
            reads[buffer] = min(size, int(elements) * V.graph.get_dtype(buffer).itemsize)
    read, written, again = sum(reads.values()), sum(writes.values()), 0
    if (found := sources.get(frozenset(each.get_name() for each in node.get_nodes()))) is not None:
        source, kernel = found
        again = sum(
            (loops - 1) * reads.get(buffer, 0)
            for buffer, loops in loops_that_load(source, kernel.args.input_buffers).items()
            if loops > 1 and _row_bytes(kernel, buffer) * ROWS_IN_FLIGHT > cache
        )
    kind = "reduction" if node.is_reduction() else "extern" if node.is_extern() else "pointwise"
    fused = get_fused_kernel_name(node.get_nodes(), "original_aten") if not node.is_extern() else node.get_name()
    return Kernel("", f"{kind} {fused}", int(read + again), int(written))


ROWS_IN_FLIGHT = 264
"""Rows that a large GPU reduces at a time: two blocks on each of 132 multiprocessors."""


def _row_bytes(kernel: Any, buffer: str) -> int:
    """Bytes of `buffer` that are reduced to one element."""
    from torch._inductor.virtualized import V

    length = 1
    for prefix, size in kernel.numels.items():
        length *= V.graph.sizevars.optimization_hint(size) if prefix.startswith("r") else 1
    return int(length) * V.graph.get_dtype(buffer).itemsize


def loops_that_load(source: str, pointers: Mapping[str, str]) -> dict[str, int]:
    """How many of the loops over a reduction in a Triton kernel read each buffer, given the names of its pointers: a
    row that the cache does not hold is read from memory by each of them."""
    loops, inside = [""], False
    for line in source.splitlines():
        if re.match(r"    for r\w*_offset in ", line):
            loops.append("")
            inside = True
        elif inside and line.strip() and not line.startswith("        "):
            inside = False
        if inside:
            loops[-1] += line
    return {buffer: sum(f"tl.load({pointer} +" in loop for loop in loops) for buffer, pointer in pointers.items()}
