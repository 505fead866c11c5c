"""All names of torch that are not part of its public interface.

torch may rename or remove them in any release. No other module of `megatron` or `tools` uses one
(`tests/pure/test_tree.py`), so that an update of torch changes this file alone. All names were seen in torch 2.13, and
`tests/pure/test_torch_private.py` looks each of them up in the installed torch. Each docstring tells what the name is
for, and what replaces it when it goes.

Two classes override a private method of torch, which cannot be an alias: `IndexReader._slice_file` in
`megatron/core/dist_checkpointing/dcp_index.py` checks every tensor before torch unpickles it (without it, check whole
files before the load), and `NoValues._should_skip_dynamo` in `megatron/extensions/plan/planner/fake_stage.py` only
saves time (without it, delete the method).

Modules of torch that are slow to import are imported when a function here is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn, overrides
from torch._subclasses import fake_tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node
from torch.distributed import distributed_c10d
from torch.utils import _device, _python_dispatch, _pytree

if TYPE_CHECKING:
    from torch._C._profiler import _ExperimentalConfig
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo


class AttentionOutputs(Protocol):
    """Forward of an attention kernel: outputs, log-sum-exps, and what else the backward needs."""

    def __call__(self, *operands: object, **options: object) -> tuple[Tensor, Tensor, *tuple[Tensor, ...]]: ...


class AttentionGradients(Protocol):
    """Backward of an attention kernel: gradients of queries, keys and values."""

    def __call__(self, *operands: object, **options: object) -> tuple[Tensor, Tensor, Tensor]: ...


# Operations on lists of tensors, one kernel for many tensors. When one goes: a loop over the tensors.

foreach_add_ = torch._foreach_add_
"""a += b for each pair of tensors. torch 2.13."""

foreach_sub_ = torch._foreach_sub_
"""a -= b for each pair of tensors. torch 2.13."""

foreach_copy_ = torch._foreach_copy_
"""Copies each tensor of a list into its counterpart. torch 2.13."""

foreach_mul_ = torch._foreach_mul_
"""Multiplies each tensor of a list by one factor. torch 2.13."""

foreach_lerp_ = torch._foreach_lerp_
"""a += factor * (b - a) for each pair of tensors. torch 2.13."""

foreach_zero_ = torch._foreach_zero_
"""Sets each tensor of a list to zero. torch 2.13."""

foreach_norm = torch._foreach_norm
"""The norm of each tensor of a list. torch 2.13. When it goes: `torch.nn.utils.get_total_norm` for one norm of all."""

# Operators without a public function

assert_async = torch._assert_async
"""Asserts on the device, without a wait of the host. torch 2.13. When it goes: leave the check out on GPUs."""

scaled_mm: Callable[..., Tensor] = torch._scaled_mm
"""Matrix product of fp8 operands with scales. torch 2.13. When it goes: `torch.nn.functional.scaled_mm`, once that
takes e5m2 operands in tiles."""

scaled_grouped_mm: Callable[..., Tensor] = torch._scaled_grouped_mm
"""fp8 matrix products of all experts in one kernel. torch 2.13. When it goes: `torch.nn.functional.scaled_grouped_mm`,
or one `scaled_mm` per expert."""

grouped_mm_overload: Callable[..., Tensor] = torch.ops.aten._grouped_mm.default
"""The operator below `torch.nn.functional.grouped_mm`, which plans answer with a shape. torch 2.13. When it goes: the
operator that a dispatch mode sees in its place."""

local_scalar_overload: Callable[..., float] = torch.ops.aten._local_scalar_dense.default
"""The operator below `Tensor.item()`, which plans answer with zero. torch 2.13. When it goes: as above."""

resize_storage_overload: Callable[..., None] = torch.ops.inductor.resize_storage_bytes_.default
"""The operator of `resize_storage`, as a dispatch mode sees it. torch 2.13. When it goes: with `resize_storage`."""

index_put_impl_: Callable[..., Tensor] = torch.ops.aten._index_put_impl_
"""`index_put_` that does not read the indices on the host. torch 2.13. When it goes: `Tensor.index_put_`."""

flash_attention_forward: Callable[..., tuple[Tensor, ...]] = torch.ops.aten._flash_attention_forward
"""FlashAttention-2 on packed documents. torch 2.13. When it goes: `torch.nn.attention.varlen.varlen_attn`."""

flash_attention_backward: AttentionGradients = torch.ops.aten._flash_attention_backward
"""Gradients of `flash_attention_forward`. torch 2.13. When it goes: autograd of `varlen_attn`."""

cudnn_attention: AttentionOutputs = torch.ops.aten._scaled_dot_product_cudnn_attention
"""cuDNN's attention. torch 2.13. When it goes: `scaled_dot_product_attention` under `sdpa_kernel`."""

cudnn_attention_backward: AttentionGradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
"""Gradients of `cudnn_attention`. torch 2.13. When it goes: autograd of `scaled_dot_product_attention`."""

cpu_attention: Callable[..., tuple[Tensor, Tensor]] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Flash attention for CPUs, which also returns the log-sum-exp that tiles are merged by. torch 2.13. When it goes:
`megatron.core.attention.tile_kernels.TorchKernel`."""

cpu_attention_backward: AttentionGradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""Gradients of `cpu_attention`. torch 2.13. When it goes: as for `cpu_attention`."""

# Tensors, storages, modules


def storage_id(memory: Tensor | torch.UntypedStorage) -> int:
    """Equal for tensors that share memory, and for their storage; fake and meta tensors have one too.

    `UntypedStorage._cdata`, torch 2.13. When it goes: `id` of a storage that the caller keeps alive.
    """
    return (memory.untyped_storage() if isinstance(memory, Tensor) else memory)._cdata


def resize_storage(tensor: Tensor, nbytes: int) -> None:
    """Frees the memory of a tensor with 0, or takes it again; autograd does not see a change of the tensor.

    Inductor's operator for FSDP, torch 2.13. When it goes: `tensor.untyped_storage().resize_(nbytes)`, which fake
    tensors do not count.
    """
    torch.ops.inductor.resize_storage_bytes_(tensor, nbytes)


def version_of(tensor: Tensor) -> int:
    """Number of writes into the memory of a tensor. `Tensor._version`, torch 2.13. When it goes: compare the values."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows a tensor as a view. `Tensor._is_view`, torch 2.13. When it goes: take it for a view."""
    return tensor._is_view()


Wrapper = TypeVar("Wrapper", bound=Tensor)
"""A subclass of Tensor for `wrapper_tensor`, torch 2.13."""


def wrapper_tensor(
    cls: type[Wrapper], shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> Wrapper:
    """Makes a tensor of a subclass, with a shape and no memory, for a `__new__`.

    `Tensor._make_wrapper_subclass`, torch 2.13. When it goes: its public successor; DTensor needs one too.
    """
    make = torch.Tensor._make_wrapper_subclass
    return make(cls, torch.Size(shape), dtype=dtype, device=device, requires_grad=False)


disabled_torch_function: Callable[..., object] = torch._C._disabled_torch_function_impl
"""As `__torch_function__` of a subclass: operations do not look for an override. torch 2.13. When it goes: a
`__torch_function__` that calls the function under `torch._C.DisableTorchFunctionSubclass`."""


def forward_hooks(module: nn.Module) -> Iterable[Callable[..., object]]:
    """The forward hooks of a module. `Module._forward_hooks`, torch 2.13. When it goes: keep the handles."""
    return module._forward_hooks.values()


def is_hooked(module: nn.Module, forward: bool = True) -> bool:
    """Return whether a module has backward hooks or, with `forward`, forward hooks.

    `Module._backward_hooks` and `_forward_hooks`, torch 2.13. When they go: take modules for hooked, which is slower.
    """
    return bool(module._backward_hooks or (forward and module._forward_hooks))


# Dispatch: fake tensors and modes

FakeTensor = fake_tensor.FakeTensor
"""A tensor without values, on which plans are made. torch 2.13. When it goes: its new place; torch.export needs it."""

FakeTensorMode = fake_tensor.FakeTensorMode
"""Makes tensors fake. torch 2.13. When it goes: as for `FakeTensor`."""

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Sees every operator below autograd. torch documents it, in this private module. torch 2.13. When it goes: its new
place."""

in_dispatch_mode = _python_dispatch.is_in_torch_dispatch_mode
"""True if a dispatch mode is active. torch 2.13. When it goes: assume one, which initializes in one thread."""

dispatch_modes: Callable[[], list[TorchDispatchMode]] = _python_dispatch._get_current_dispatch_mode_stack
"""The active dispatch modes. torch 2.13. When it goes: enter the modes by `with` in the second thread."""

push_mode = _python_dispatch._push_mode
"""Enters a dispatch mode of another thread. torch 2.13. When it goes: `mode.__enter__()`."""

pop_mode = _python_dispatch._pop_mode
"""Leaves the innermost dispatch mode. torch 2.13. When it goes: `mode.__exit__(None, None, None)`."""

tree_flatten = _pytree.tree_flatten
"""The leaves of nested containers. torch 2.13. When it goes: a recursion over tuples, lists and dicts."""

tree_unflatten = _pytree.tree_unflatten
"""Rebuilds nested containers from their leaves. torch 2.13. When it goes: as for `tree_flatten`."""


@contextmanager
def no_function_modes() -> Iterator[None]:
    """Suspends the `TorchFunctionMode`s of the caller, `with torch.device(...)` among them.

    `torch.overrides._push_mode` and `_pop_mode`, torch 2.13. When they go: run the body in a thread, which has none.
    """
    modes = [overrides._pop_mode() for _ in range(overrides._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            overrides._push_mode(mode)


device_constructors: Callable[[], set[Callable[..., object]]] = _device._device_constructors
"""Functions that make tensors, to which `with torch.device(...)` applies. torch 2.13. When it goes: use that `with`."""


OpOverload = torch._ops.OpOverload
"""An operator, as dispatch modes see it. `torch._ops.OpOverload`, torch 2.13. When it goes: annotate `Callable`."""


def schema_of(operator: OpOverload) -> torch._C.FunctionSchema:
    """Schema of an operator: its name, arguments and returns.

    The `_schema` of an operator, torch 2.13. When it goes: parse the text of the operator.
    """
    return operator._schema


def preload_compiler() -> None:
    """Imports torch._dynamo, which torch.optim imports on first use, before ranks are forked. torch 2.13. When it goes:
    delete the call; each rank then imports it."""


def raise_recompile_limit(least: int) -> None:
    """Permits at least `least` variants of a compiled function. `torch._dynamo.config`, torch 2.13. When it goes:
    `torch.compiler.config.recompile_limit`."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, least)


# Autograd


class AutogradContext(FunctionCtx):
    """The `ctx` of both passes of an autograd function, for annotations alone: torch makes the objects by itself. Its
    own `FunctionCtx` is public, but leaves out what a backward reads.

    A function that keeps values of its own on `ctx` declares them in a subclass:

        class DropContext(AutogradContext):
            p: float

        class Drop(torch.autograd.Function):
            @staticmethod
            def forward(ctx: DropContext, x: Tensor, p: float) -> Tensor: ...
    """

    saved_tensors: tuple[Tensor, ...]
    """The arguments of `save_for_backward`. An operand that was None is None here too."""

    needs_input_grad: tuple[bool, ...]
    """For each argument of the forward, whether its gradient is needed."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Saves operands and results of the forward. torch's own annotation leaves out None."""


def sequence_number(node: Node) -> int:
    """Number of a node of the graph: nodes made later have a larger one. `Node._sequence_nr`, torch 2.13. When it goes:
    count nodes in a saved-tensor hook."""
    return node._sequence_nr()


next_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr
"""The number of the next node that this thread makes. torch 2.13. When it goes: as for `sequence_number`."""


def running_node() -> Node | None:
    """The node whose backward runs in this thread; None outside of a backward.

    `torch._C._current_autograd_node`, torch 2.13. When it goes: a pre-hook on each node that notes it.
    """
    return torch._C._current_autograd_node()


def call_after_backward(function: Callable[[], None]) -> None:
    """Calls `function` when the backward that runs now ends. `Variable._execution_engine`, torch 2.13. When it goes:
    the new place of `queue_callback`; FSDP2 uses it."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


# Process groups


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    """Sets the timeout of the collectives of a group. `_set_pg_timeout`, torch 2.13. When it goes: its public
    successor, or groups made with their timeout."""
    distributed_c10d._set_pg_timeout(timeout, group)


def default_store() -> dist.Store:
    """The rendezvous store of the default group. `_get_default_store`, torch 2.13. When it goes: pass a store of our
    own to `init_process_group`."""
    return distributed_c10d._get_default_store()


def default_group() -> dist.ProcessGroup:
    """The group of all ranks. `_get_default_group`, torch 2.13. When it goes: `dist.group.WORLD`, which may be None."""
    return distributed_c10d._get_default_group()


def known_groups() -> distributed_c10d._World:
    """torch's tables of process groups: their ranks, names, backends. Plans add fake groups to them.

    `distributed_c10d._world`, torch 2.13. When it goes: make fake groups with `dist.new_group` under backend `fake`.
    """
    return distributed_c10d._world


def fake_work() -> dist.Work:
    """A collective that is complete at once. `FakeWork`, torch 2.13. When it goes: a `dist.Work` of a `fake` group."""
    from torch._C._distributed_c10d import FakeWork

    return FakeWork()


def fake_store() -> dist.Store:
    """The store of groups of the backend `fake`, which the import registers. `torch.testing._internal`, torch 2.13.
    When it goes: `dist.HashStore()` and torch's new place of the backend."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def flight_records() -> list[str]:
    """The records of the flight recorder of each backend, as JSON; without those that this torch lacks.

    `_dump_nccl_trace_json` and `_dump_fr_trace_json`, torch 2.13. When they go: hang reports name no collective.
    """
    import torch._C._distributed_c10d as c10d

    dumps = (getattr(c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"))
    return [dump(True, False) for dump in dumps if dump is not None]


def load_symmetric_memory() -> None:
    """Registers `torch.ops.symm_mem`. `torch.distributed._symmetric_memory`, torch 2.13. When it goes: its public
    successor; `--tp-comm-overlap-method ring` does without it."""


# Files


def storage_info(name: str, offset: int, length: int) -> StorageInfo:
    """Place of a tensor in a file of a DCP checkpoint. `_StorageInfo`, torch 2.13; its name is part of the file format,
    so it can move but must stay readable. When it goes: what DCP's own writer puts there."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(name, offset, length)


def archive_reader(file: IO[bytes]) -> torch._C.PyTorchFileReader:
    """torch's own reader of the zip files of `torch.save`. `torch._C.PyTorchFileReader`, torch 2.13. When it goes:
    `zipfile`, with a refusal of files that the two could read differently."""
    return torch._C.PyTorchFileReader(file)


# Devices and profiles


def matmul_instructions(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies matrices of a 16-bit `dtype` on this CPU, and not by emulation.

    oneDNN accepts bf16 on every CPU with AVX-512, and emulates it on those without the instructions. `torch.ops.mkldnn`
    and `torch.cpu`, torch 2.13. When they go: `torch.cpu.get_capabilities()`.
    """
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    emulated = torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and not emulated


def record_memory_history(when_out_of_memory: Callable[[], None]) -> None:
    """Records the allocations of GPUs, and calls a function when memory runs out.

    `torch.cuda.memory._record_memory_history` (documented by torch) and `torch._C._cuda_attach_out_of_memory_observer`,
    torch 2.13. When they go: refuse `--record-memory-history`.
    """
    torch.cuda.memory._record_memory_history()
    observe = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
    observe(lambda *facts: when_out_of_memory())


def dump_memory_history(path: str) -> None:
    """Writes the recorded allocations. `torch.cuda.memory._dump_snapshot`, torch 2.13. When it goes: as above."""
    torch.cuda.memory._dump_snapshot(path)


def profiler_options(all_threads: bool) -> _ExperimentalConfig:
    """Options of `torch.profiler.profile`. `_ExperimentalConfig`, torch 2.13. When it goes: leave the option out;
    threads beside the first one are then missing from profiles."""
    from torch._C._profiler import _ExperimentalConfig

    return _ExperimentalConfig(profile_all_threads=all_threads)


def keep_gpu_busy(cycles: int) -> None:
    """Spins on the GPU. `torch.cuda._sleep`, torch 2.13. When it goes: a long matrix product."""
    torch.cuda._sleep(cycles)
