"""Compare the kernels with plain torch for the tensor shapes of a run. Slower kernels are turned off.

All ranks make the same choice, because a kernel is judged by its largest error and its longest time on any rank.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import unwrap
from typing import Generic, ParamSpec, Protocol, TypeVar, TypeVarTuple, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.collectives import all_reduce_
from megatron.core.kernels import KERNELS, LEFT_OUT
from megatron.core.parallel_state import Axis
from megatron.core.torch_private import tree_flatten, tree_unflatten
from megatron.core.transformer.activation_store import tensors_in
from megatron.extensions.speed.fp8.flags import Fp8Flags
from megatron.training.config.run_config import RunConfig

WARM_UP, REPEATS = 3, 10

SLOWER = 1.1
"""Allowed time of a kernel relative to the time of torch. The margin keeps timing noise from changing the choice of
kernel, which would change the last bits of a run's results."""

OF_FP8 = 4
"""Factor that multiplies the allowed error if results are in fp8. A region that torch compiles rounds to fp8 without
first rounding to 16 bits. The omitted rounding changes results by 1.3 % in e4m3 and by 1.6 % in e5m2."""

NOT_A_NUMBER = 1e9
"""Value that is reported as a kernel's error if the error is NaN."""

Clock = Callable[[Callable[[], object]], float]
"""Function that measures how many seconds a call takes."""


@dataclass(frozen=True)
class Choice:
    """Result of a comparison of kernels: the time of each kernel in seconds. The time is infinite if a kernel does not
    support the shape or is not installed. `errors` maps the names of kernels that failed on this rank to their
    errors."""

    seconds: Mapping[str, float]
    errors: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def winner(self) -> str | None:
        """Return the name of the fastest kernel; None if no kernel supports the shape."""
        name = min(self.seconds, key=self.seconds.__getitem__)
        return name if math.isfinite(self.seconds[name]) else None

    @property
    def times(self) -> str:
        """Return the times of all kernels as text for the log."""
        return ", ".join(
            f"{name} {1e3 * seconds:.2f} ms" if math.isfinite(seconds) else f"{name} unavailable{self._why(name)}"
            for name, seconds in self.seconds.items()
        )

    def _why(self, name: str) -> str:
        return f": {self.errors[name]}" if name in self.errors else ""


@dataclass(frozen=True)
class RunShapes:
    """Sizes, dtype and device of one rank's tensors in training."""

    tokens: int
    """Number of tokens in a micro-batch."""
    length: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    experts: int
    dtype: torch.dtype
    device: torch.device
    fp8: str | None = None
    """fp8 recipe; None if the run does not use fp8."""
    expert_rows: int = 0
    """Number of rows of all local experts in a micro-batch, if tokens are evenly distributed over the experts."""
    expert_matrices: tuple[tuple[int, int], ...] = ()
    """Sizes (outputs, inputs) of each linear layer of an expert."""
    config: RunConfig | None = None
    """Configuration of the run, for kernels whose choice depends on settings other than shapes."""

    @classmethod
    def of(cls, config: RunConfig, device: torch.device) -> RunShapes:
        model = config.model
        parallel = config.parallel
        own = config.options(Fp8Flags)
        tp, length = parallel.tensor_model_parallel_size, model.seq_length // parallel.context_parallel_size
        tokens = config.training.micro_batch_size * length
        expert_width, expert_io = model.moe_ffn_size // parallel.expert_tp, model.expert_io_size
        matrices = ((expert_width * (2 if model.gated else 1), expert_io), (expert_io, expert_width))
        return cls(
            tokens=tokens,
            length=length,
            hidden=model.hidden_size,
            ffn=model.ffn_size // tp,
            heads=model.num_attention_heads // tp,
            groups=max(1, model.query_groups // tp),
            head_dim=model.head_dim,
            vocab=(model.vocab_size or 0) // tp,
            experts=(model.num_experts or 0) // parallel.expert_model_parallel_size,
            dtype=getattr(torch, parallel.params_dtype),
            device=device,
            fp8=None if own.fp8_format is None else own.fp8_recipe,
            expert_rows=tokens * model.moe_router_topk * parallel.expert_tp // tp if model.num_experts else 0,
            expert_matrices=matrices if model.num_experts else (),
            config=config,
        )

    def random(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(sum(size))
        return torch.randn(size, generator=generator, dtype=dtype or self.dtype, device=self.device)


P = ParamSpec("P")
R = TypeVar("R")
Operands = TypeVarTuple("Operands")


@runtime_checkable
class ComparedKernel(Protocol):
    """Kernel that is compared with plain torch at the start of a run."""

    def lost(self, shapes: RunShapes, world: Axis, clock: Clock | None) -> str | None:
        """Return the reason why a run with these shapes does not use the kernel; None if the run uses it. Collective
        over all ranks of the world."""


@dataclass(frozen=True)
class FusedKernel(Generic[*Operands, R]):
    """Kernel that replaces a plain-torch operation. The fields contain the functions and limits for a comparison of the
    kernel with plain torch."""

    run: Callable[[*Operands], R]
    plain: Callable[[*Operands], R]
    """Function that computes the operation in plain torch, from the same operands."""
    suits: Callable[[*Operands], bool]
    """Predicate that returns True if the kernel supports the given operands."""
    samples: Callable[[RunShapes], Iterable[tuple[*Operands]]]
    """Function that yields the operands with which a run calls the operation. If the run does not perform the
    operation, the function yields nothing."""
    tolerance: float
    """Allowed error of the tensors that the kernel returns or overwrites: the norm of the error, divided by the norm of
    the correct tensor."""
    planned: Callable[..., R] | None = None
    """Function that a dry run calls instead of the kernel. The function records the launch in its first argument, a
    `Launches` (`plan/planner/as_on_gpus.py`), and returns tensors with the shapes of the results. The other arguments
    of the function are the operands of the kernel. If None, a dry run counts the torch operations of `plain`
    instead."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "plain", getattr(self.plain, "__wrapped__", self.plain))

    def __call__(self, *operands: *Operands) -> R:
        return self.run(*operands)

    def lost(self, shapes: RunShapes, world: Axis, clock: Clock | None) -> str | None:
        """Return the reason why a run does not use the kernel; None if it uses the kernel. A kernel is not used if, on
        operands with the shapes of the run, it returns wrong results, raises an error, or takes longer than torch.
        Collective over all ranks of the world."""
        for operands in self.samples(shapes):
            if (why := _lost(self, operands, shapes.device, world, clock)) is not None:
                return why
        return None


@cache
def fused_kernels() -> dict[str, FusedKernel[*tuple[object, ...], object]]:
    """Return all registered kernels that replace torch functions, keyed by name."""
    return {name: kernel for name in KERNELS if isinstance(kernel := KERNELS[name], FusedKernel)}


@cache
def operations() -> dict[Callable[..., object], str]:
    """Return a mapping from torch functions to the names of the kernels that may replace these functions."""
    return {unwrap(kernel.plain): name for name, kernel in fused_kernels().items()}


@cache
def planned_kernels() -> dict[str, Callable[..., object]]:
    """Return a mapping from kernel names to `FusedKernel.planned`, without the kernels for which this field is None."""
    return {name: kernel.planned for name, kernel in fused_kernels().items() if kernel.planned is not None}


def choose_kernels(
    shapes: RunShapes,
    world: Axis,
    clock: Clock | None,
    say: Callable[[str], None],
    kernels: Mapping[str, object] | None = None,
) -> None:
    """Compare every registered kernel with torch, on operands with the tensor shapes of a run. Collective over all
    ranks of `world`.

    A kernel is turned off if it returns wrong results, raises an error, or takes longer than torch.

    Args:
        shapes: Shapes of the run.
        world: Axis that contains all ranks of the run.
        clock: Function that times a run. If None, times are not compared.
        say: Function that prints a log line.
        kernels: Kernels to compare; the default is all registered kernels.
    """
    LEFT_OUT.clear()
    found: Mapping[str, object] = {name: KERNELS[name] for name in KERNELS} if kernels is None else kernels
    for name, kernel in found.items():
        if isinstance(kernel, ComparedKernel) and (why := kernel.lost(shapes, world, clock)) is not None:
            LEFT_OUT.add(name)
            say(f" kernel {name} left out: {why}")


def _lost(
    kernel: FusedKernel[*Operands, R],
    operands: tuple[*Operands],
    device: torch.device,
    world: Axis,
    clock: Clock | None,
) -> str | None:
    """Compare a kernel with plain torch on `operands`. Return the reason why the kernel is turned off; None if it is
    used."""
    failed = "raises an error on another rank"
    try:
        error = _error(kernel, operands) if kernel.suits(*operands) else 0.0
    except Exception as raised:
        error, failed = math.inf, f"raises {type(raised).__name__}: {' '.join(str(raised).split())}"
    largest = torch.tensor(error, dtype=torch.float64, device=device)
    all_reduce_(largest, world, dist.ReduceOp.MAX)
    if (worst := largest.item()) > kernel.tolerance:
        return failed if math.isinf(worst) else f"differs by {worst:.1e}, more than {kernel.tolerance:.1e}"
    if clock is None or not kernel.suits(*operands):
        return None
    runs: dict[str, Callable[[], object]] = {
        "kernel": lambda: kernel(*operands),
        "torch": lambda: kernel.plain(*operands),
    }
    seconds = compare(runs, clock, device, world).seconds
    ratio = seconds["kernel"] / seconds["torch"]
    return f"takes {ratio:.2f} times as long as torch" if ratio > SLOWER else None


def _error(kernel: FusedKernel[*Operands, R], operands: tuple[*Operands]) -> float:
    """Return the largest relative error of the tensors that the kernel returns or overwrites. The error of a tensor is
    the norm of its difference from torch's tensor, divided by the norm of torch's tensor."""
    mine, theirs = (copied(operands) for _ in range(2))
    results, expected = (kernel(*mine), mine), (kernel.plain(*theirs), theirs)
    pairs = zip(tensors_in(results), tensors_in(expected), strict=True)
    return max((_relative(*pair) for pair in pairs), default=0.0)


def _relative(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        raise RuntimeError(f"its result is {list(found.shape)}, and torch's {list(expected.shape)}")
    wide = torch.float64 if expected.itemsize == 8 else torch.float32
    allowed = OF_FP8 if expected.is_floating_point() and expected.itemsize == 1 else 1
    found, expected = found.to(wide), expected.to(wide)
    error = (found - expected).norm().item() / (expected.norm().item() or 1.0)
    return NOT_A_NUMBER if math.isnan(error) else error / allowed


def copied(value: R) -> R:
    """Copy nested tuples and lists, including the tensors that they contain."""
    leaves, structure = tree_flatten(value)
    copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    found: R = tree_unflatten(copies, structure)
    return found


def compare(runs: dict[str, Callable[[], object]], clock: Clock, device: torch.device, world: Axis) -> Choice:
    """Time each function in `runs` on every rank. Returns the times of the slowest rank. Collective over all ranks of
    `world`.

    Args:
        runs: Functions to time, keyed by kernel name. Each function is removed from the mapping after it is timed, so
            that its operands are freed.
        clock: Function that times a run.
        device: Device on which the ranks' times are reduced.
        world: Axis of all ranks.
    """
    names, errors = list(runs), dict[str, str]()
    found = [_time(name, runs.pop(name), clock, errors) for name in names]
    seconds = torch.tensor(found, dtype=torch.float64, device=device)
    all_reduce_(seconds, world, dist.ReduceOp.MAX)
    return Choice(dict(zip(names, seconds.tolist(), strict=True)), errors)


LONGEST_ERROR = 120
"""Maximum number of characters of an error message in a log line."""


def _time(name: str, run: Callable[[], object], clock: Clock, errors: dict[str, str]) -> float:
    """Time a run in seconds. If the run raises an error, return infinity and store the reason in `errors`. Possible
    reasons are an unsupported shape, a missing package, or a package version whose functions have a different
    signature."""
    try:
        return clock(run)
    except Exception as raised:
        errors[name] = f"{type(raised).__name__}: {' '.join(str(raised).split())}"[:LONGEST_ERROR]
        return math.inf


def device_clock(run: Callable[[], object]) -> float:
    """Return the median time of `REPEATS` runs, in seconds on the GPU."""
    for _ in range(WARM_UP):
        run()
    found = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found)


@cache
def has_triton() -> bool:
    """Return True if Triton is installed. This check does not import Triton."""
    return find_spec("triton") is not None


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU, or 4 for any other device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def runs_triton(x: Tensor) -> bool:
    """Return True if Triton kernels can run on `x`."""
    return x.is_cuda and has_triton()


def no_result(*operands: object) -> None:
    """Fake implementation of an operator that writes its results to operands."""


def gpu_operator(
    place: str, schema: str, fake: Callable[P, R], package: str = __name__.rpartition(".")[0]
) -> Callable[P, R]:
    """Register the operator `megatron::NAME` for GPUs, so that fake tensors, dry runs and profilers treat the kernel as
    a single operator.

    Args:
        place: Function that computes the operator, given as "module:NAME". The module may import Triton, and is
            imported when the operator first runs.
        schema: Schema of the operator.
        fake: Function with the same signature that returns uninitialized tensors with the shapes and dtypes of the
            results.
        package: Package that contains the module.
    """
    module, name = place.split(":")

    def run(*operands: P.args, **options: P.kwargs) -> R:
        result: R = getattr(import_module(f"{package}.{module}"), name)(*operands, **options)
        return result

    written = re.findall(r"\(a!\)\S* (\w+)", schema)
    operator = torch.library.custom_op(
        f"megatron::{name}", run, mutates_args=written, device_types="cuda", schema=schema
    )
    operator.register_fake(fake)
    return operator
