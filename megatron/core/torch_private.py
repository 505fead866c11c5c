"""All private names of torch that this library uses. torch may rename or remove private names in any release. No other
module of `megatron` or `tools` uses a private name (`tests/pure/test_tree.py`), so that an update of torch affects only
this file. All names exist in torch 2.13, and `tests/pure/test_torch_private.py` looks up each of them in the installed
torch. Each docstring describes the name and, after "Fallback", the replacement if torch removes the name.

Two classes override private methods of torch outside of this file, because an override cannot be aliased:
`IndexReader._slice_file` in `megatron/core/dist_checkpointing/dcp_index.py` checks every tensor before torch unpickles
it. If torch removes this method, check whole files before the load. `NoValues._should_skip_dynamo` in
`megatron/extensions/plan/planner/fake_stage.py` only saves time. If torch removes this method, delete the override.

Functions in this file import slow modules of torch when they are called.
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
    """Forward pass of an attention kernel. The function returns the output, the log-sum-exp, and further values for the
    backward pass."""

    def __call__(self, *operands: object, **options: object) -> tuple[Tensor, Tensor, *tuple[Tensor, ...]]: ...


class AttentionGradients(Protocol):
    """Backward pass of an attention kernel, which returns the gradients of queries, keys and values."""

    def __call__(self, *operands: object, **options: object) -> tuple[Tensor, Tensor, Tensor]: ...


# Operations on lists of tensors, with one kernel for many tensors. Fallback: a loop over the tensors.

foreach_add_ = torch._foreach_add_
"""a += b for each pair of tensors. torch 2.13."""

foreach_sub_ = torch._foreach_sub_
"""a -= b for each pair of tensors. torch 2.13."""

foreach_copy_ = torch._foreach_copy_
"""Copy each tensor of a list into the corresponding tensor of another list. torch 2.13."""

foreach_mul_ = torch._foreach_mul_
"""Multiply each tensor of a list by a scalar in place. torch 2.13."""

foreach_lerp_ = torch._foreach_lerp_
"""a += factor * (b - a) for each pair of tensors. torch 2.13."""

foreach_zero_ = torch._foreach_zero_
"""Set each tensor of a list to zero. torch 2.13."""

foreach_norm = torch._foreach_norm
"""Return the norm of each tensor in a list. torch 2.13. Fallback: `torch.nn.utils.get_total_norm`, where only one norm
over all tensors is needed."""

# Operators without a public function

assert_async = torch._assert_async
"""Assert on the device that a tensor is true, without blocking the host. torch 2.13. Fallback: omit the check on
GPUs."""

scaled_mm: Callable[..., Tensor] = torch._scaled_mm
"""Matrix product of fp8 operands with scales. torch 2.13. Fallback: `torch.nn.functional.scaled_mm`, as soon as this
function supports tiled e5m2 operands."""

scaled_grouped_mm: Callable[..., Tensor] = torch._scaled_grouped_mm
"""fp8 matrix products of all experts in one kernel. torch 2.13. Fallback: `torch.nn.functional.scaled_grouped_mm`,
or one `scaled_mm` per expert."""

grouped_mm_overload: Callable[..., Tensor] = torch.ops.aten._grouped_mm.default
"""The operator that `torch.nn.functional.grouped_mm` calls. Memory plans compute only the shape of this operator's
result. torch 2.13. Fallback: the operator that a dispatch mode then sees for a call of `grouped_mm`."""

local_scalar_overload: Callable[..., float] = torch.ops.aten._local_scalar_dense.default
"""The operator that `Tensor.item()` calls. In memory plans, this operator returns zero. torch 2.13. Fallback: the
operator that a dispatch mode then sees for a call of `item`."""

resize_storage_overload: Callable[..., None] = torch.ops.inductor.resize_storage_bytes_.default
"""The operator that a dispatch mode sees for a call of `resize_storage`. torch 2.13. Fallback: the operator that a
dispatch mode sees for a call of the function that replaces `resize_storage`."""

index_put_impl_: Callable[..., Tensor] = torch.ops.aten._index_put_impl_
"""Variant of `index_put_` that does not read the indices on the host. torch 2.13. Fallback: `Tensor.index_put_`."""

flash_attention_forward: Callable[..., tuple[Tensor, ...]] = torch.ops.aten._flash_attention_forward
"""FlashAttention-2 on packed documents. torch 2.13. Fallback: `torch.nn.attention.varlen.varlen_attn`."""

flash_attention_backward: AttentionGradients = torch.ops.aten._flash_attention_backward
"""Gradients of `flash_attention_forward`. torch 2.13. Fallback: differentiate `varlen_attn` with autograd."""

cudnn_attention: AttentionOutputs = torch.ops.aten._scaled_dot_product_cudnn_attention
"""cuDNN's attention. torch 2.13. Fallback: `scaled_dot_product_attention` under `sdpa_kernel`."""

cudnn_attention_backward: AttentionGradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
"""Gradients of `cudnn_attention`. torch 2.13. Fallback: differentiate `scaled_dot_product_attention` with autograd."""

cpu_attention: Callable[..., tuple[Tensor, Tensor]] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Flash attention for CPUs, which also returns the log-sum-exp that is needed to merge tiles. torch 2.13. Fallback:
`megatron.core.attention.tile_kernels.TorchKernel`."""

cpu_attention_backward: AttentionGradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""Gradients of `cpu_attention`. torch 2.13. Fallback: see `cpu_attention`."""

# Tensors, storages, modules


def storage_id(memory: Tensor | torch.UntypedStorage) -> int:
    """Return an id that is the same for a storage and all tensors that share it. Storages of fake and meta tensors also
    have ids.

    `UntypedStorage._cdata`, torch 2.13. Fallback: use `id(storage)`, and keep the storage object alive so that no other
    object gets the same id.
    """
    return (memory.untyped_storage() if isinstance(memory, Tensor) else memory)._cdata


def resize_storage(tensor: Tensor, nbytes: int) -> None:
    """Resize the memory of a tensor. A size of 0 bytes frees the memory, and the full size allocates it again. Autograd
    does not treat the resize as a change of the tensor.

    `torch.ops.inductor.resize_storage_bytes_`, which inductor uses for FSDP, torch 2.13. Fallback:
    `tensor.untyped_storage().resize_(nbytes)`. Memory plans then do not see the resize.
    """
    torch.ops.inductor.resize_storage_bytes_(tensor, nbytes)


def version_of(tensor: Tensor) -> int:
    """Return the number of in-place changes of a tensor. `Tensor._version`, torch 2.13. Fallback: compare the tensor's
    values with a copy."""
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd treats a tensor as a view. `Tensor._is_view`, torch 2.13. Fallback: always return
    True."""
    return tensor._is_view()


Wrapper = TypeVar("Wrapper", bound=Tensor)
"""Type of the tensor that `wrapper_tensor` creates: a subclass of Tensor. torch 2.13."""


def wrapper_tensor(
    cls: type[Wrapper], shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> Wrapper:
    """Create a tensor with a shape but no memory, for the `__new__` of a subclass.

    `Tensor._make_wrapper_subclass`, torch 2.13. Fallback: call the function with which DTensor creates its tensors in
    that release.
    """
    make = torch.Tensor._make_wrapper_subclass
    return make(cls, torch.Size(shape), dtype=dtype, device=device, requires_grad=False)


disabled_torch_function: Callable[..., object] = torch._C._disabled_torch_function_impl
"""Value to assign to `__torch_function__` of a tensor subclass, so that operations on the subclass do not look for an
override. torch 2.13. Fallback: a `__torch_function__` that calls the function under
`torch._C.DisableTorchFunctionSubclass`."""


def forward_hooks(module: nn.Module) -> Iterable[Callable[..., object]]:
    """Return the forward hooks of a module. `Module._forward_hooks`, torch 2.13. Fallback: record the handles of all
    hooks that are registered."""
    return module._forward_hooks.values()


def is_hooked(module: nn.Module, forward: bool = True) -> bool:
    """Return whether a module has backward hooks or, with `forward`, forward hooks.

    `Module._backward_hooks` and `_forward_hooks`, torch 2.13. Fallback: always return True, which is slower.
    """
    return bool(module._backward_hooks or (forward and module._forward_hooks))


# Dispatch: fake tensors and modes

FakeTensor = fake_tensor.FakeTensor
"""Tensor that has a shape and a dtype but no data. Memory plans use fake tensors. torch 2.13. Fallback: import the
class from wherever torch.export imports it."""

FakeTensorMode = fake_tensor.FakeTensorMode
"""Mode in which operations create fake tensors. torch 2.13. Fallback: see `FakeTensor`."""

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""Base class of modes that intercept every operator below autograd. torch documents the class although its module is
private. torch 2.13. Fallback: import the class from its new module."""

in_dispatch_mode = _python_dispatch.is_in_torch_dispatch_mode
"""Return True if a dispatch mode is active. torch 2.13. Fallback: assume that a mode is active, so that a single thread
initializes weights."""

dispatch_modes: Callable[[], list[TorchDispatchMode]] = _python_dispatch._get_current_dispatch_mode_stack
"""Return the active dispatch modes. torch 2.13. Fallback: pass the modes explicitly to each thread that needs them, and
enter them there with `with`."""

push_mode = _python_dispatch._push_mode
"""Enter a dispatch mode that another thread created. torch 2.13. Fallback: `mode.__enter__()`."""

pop_mode = _python_dispatch._pop_mode
"""Leave the innermost dispatch mode. torch 2.13. Fallback: `mode.__exit__(None, None, None)`."""

tree_flatten = _pytree.tree_flatten
"""Return the leaves of nested containers. torch 2.13. Fallback: a recursion over tuples, lists and dicts."""

tree_unflatten = _pytree.tree_unflatten
"""Rebuild nested containers from their leaves. torch 2.13. Fallback: see `tree_flatten`."""


@contextmanager
def no_function_modes() -> Iterator[None]:
    """Suspend the caller's `TorchFunctionMode`s, including `with torch.device(...)`.

    `torch.overrides._push_mode` and `_pop_mode`, torch 2.13. Fallback: run the body in a new thread, because modes
    apply only to the thread that entered them.
    """
    modes = [overrides._pop_mode() for _ in range(overrides._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            overrides._push_mode(mode)


device_constructors: Callable[[], set[Callable[..., object]]] = _device._device_constructors
"""Return the functions that create a tensor on the device of a surrounding `with torch.device(...)`. torch 2.13.
Fallback: use `with torch.device(...)`."""


OpOverload = torch._ops.OpOverload
"""Type of the operators that dispatch modes intercept. `torch._ops.OpOverload`, torch 2.13. Fallback: annotate
`Callable`."""


def schema_of(operator: OpOverload) -> torch._C.FunctionSchema:
    """Return the schema of an operator: its name, arguments and returns.

    `OpOverload._schema`, torch 2.13. Fallback: parse the operator's text form.
    """
    return operator._schema


def preload_compiler() -> None:
    """Import torch._dynamo before ranks are forked, because torch.optim would otherwise import it in each rank on first
    use. torch 2.13. Fallback: do nothing; each rank then imports torch._dynamo separately."""


def raise_recompile_limit(least: int) -> None:
    """Permit torch to compile at least `least` variants of a function. `torch._dynamo.config`, torch 2.13. Fallback:
    `torch.compiler.config.recompile_limit`."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, least)


# Autograd


class AutogradContext(FunctionCtx):
    """Type of the `ctx` argument of autograd functions, for annotations only: torch creates the objects. torch's public
    `FunctionCtx` lacks the attributes that a backward pass reads.

    If an autograd function stores further attributes on `ctx`, declare the attributes in a subclass:

        class DropContext(AutogradContext):
            p: float

        class Drop(torch.autograd.Function):
            @staticmethod
            def forward(ctx: DropContext, x: Tensor, p: float) -> Tensor: ...
    """

    saved_tensors: tuple[Tensor, ...]
    """Tensors passed to `save_for_backward`, including None operands."""

    needs_input_grad: tuple[bool, ...]
    """One bool for each argument of `forward`: True if the gradient of the argument is needed."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save operands and results of the forward pass for the backward pass. The annotation of this method permits
        None, whereas torch's annotation does not."""


def sequence_number(node: Node) -> int:
    """Return the sequence number of a node in the autograd graph. Nodes that are created later have larger numbers.
    `Node._sequence_nr`, torch 2.13. Fallback: count nodes in a saved-tensor hook."""
    return node._sequence_nr()


next_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr
"""Return the sequence number of the next node that this thread creates. torch 2.13. Fallback: see `sequence_number`."""


def running_node() -> Node | None:
    """Return the node whose backward function is running in this thread; None outside of a backward pass.

    `torch._C._current_autograd_node`, torch 2.13. Fallback: register a pre-hook on each node that records which node
    runs.
    """
    return torch._C._current_autograd_node()


def call_after_backward(function: Callable[[], None]) -> None:
    """Call `function` when the current backward pass ends. `Variable._execution_engine`, torch 2.13. Fallback: find
    `queue_callback` where FSDP2 imports it, if torch has moved it."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


# Process groups


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    """Set the timeout of a group's collectives. `_set_pg_timeout`, torch 2.13. Fallback: call the public function that
    replaces this one, or pass the timeout when groups are created."""
    distributed_c10d._set_pg_timeout(timeout, group)


def default_store() -> dist.Store:
    """Return the rendezvous store of the default group. `_get_default_store`, torch 2.13. Fallback: pass a custom store
    to `init_process_group`."""
    return distributed_c10d._get_default_store()


def default_group() -> dist.ProcessGroup:
    """Return the group of all ranks. `_get_default_group`, torch 2.13. Fallback: `dist.group.WORLD`, which is None
    before the default group exists."""
    return distributed_c10d._get_default_group()


def known_groups() -> distributed_c10d._World:
    """Return the object in which torch records the ranks, name and backend of each process group. Memory plans register
    fake groups in this object.

    `distributed_c10d._world`, torch 2.13. Fallback: create fake groups with `dist.new_group` and the backend `fake`.
    """
    return distributed_c10d._world


def fake_work() -> dist.Work:
    """Return a collective that is already complete. `FakeWork`, torch 2.13. Fallback: launch a collective in a group of
    the backend `fake`, and return its `dist.Work`."""
    from torch._C._distributed_c10d import FakeWork

    return FakeWork()


def fake_store() -> dist.Store:
    """Return a store for groups of the backend `fake`. The import in this function registers the backend.
    `torch.testing._internal`, torch 2.13. Fallback: import the backend from the module to which torch has moved it, and
    use `dist.HashStore()`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def flight_records() -> list[str]:
    """Return the flight-recorder records of each backend as JSON; backends that this torch lacks are omitted.

    `_dump_nccl_trace_json` and `_dump_fr_trace_json`, torch 2.13. Fallback: return no records. Reports of a hang then
    lack the names of collectives.
    """
    import torch._C._distributed_c10d as c10d

    dumps = (getattr(c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"))
    return [dump(True, False) for dump in dumps if dump is not None]


def load_symmetric_memory() -> None:
    """Register `torch.ops.symm_mem`. `torch.distributed._symmetric_memory`, torch 2.13. Fallback: import a public
    replacement of this module if torch has one. `--tp-comm-overlap-method ring` works without symmetric memory."""


# Files


def storage_info(name: str, offset: int, length: int) -> StorageInfo:
    """Return the location of a tensor in a file of a DCP checkpoint. `_StorageInfo`, torch 2.13. Checkpoint files
    contain the import path of this class, so torch must keep that path readable even if it moves the class. Fallback:
    import the class that replaces `_StorageInfo` in DCP's file-system writer."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(name, offset, length)


def archive_reader(file: IO[bytes]) -> torch._C.PyTorchFileReader:
    """Return torch's reader for the zip files that `torch.save` writes. `torch._C.PyTorchFileReader`, torch 2.13.
    Fallback: read with `zipfile`, but refuse files that `zipfile` and torch's reader could interpret differently."""
    return torch._C.PyTorchFileReader(file)


# Devices and profiles


def matmul_instructions(dtype: torch.dtype) -> bool:
    """Return whether this CPU has matrix instructions for a 16-bit `dtype`. oneDNN accepts bf16 on every CPU with
    AVX-512, but emulates it on CPUs without such instructions. This function calls private functions of
    `torch.ops.mkldnn` and `torch.cpu`, torch 2.13. Fallback: `torch.cpu.get_capabilities()`.
    """
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    emulated = torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and not emulated


def record_memory_history(when_out_of_memory: Callable[[], None]) -> None:
    """Record GPU allocations, and call a function when memory runs out.

    This function calls `torch.cuda.memory._record_memory_history`, which torch documents, and
    `torch._C._cuda_attach_out_of_memory_observer`, torch 2.13. Fallback: refuse `--record-memory-history`.
    """
    torch.cuda.memory._record_memory_history()
    observe = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
    observe(lambda *facts: when_out_of_memory())


def dump_memory_history(path: str) -> None:
    """Write the recorded allocations to a file. `torch.cuda.memory._dump_snapshot`, torch 2.13. Fallback: see
    `record_memory_history`."""
    torch.cuda.memory._dump_snapshot(path)


def profiler_options(all_threads: bool) -> _ExperimentalConfig:
    """Return options for `torch.profiler.profile`. `_ExperimentalConfig`, torch 2.13. Fallback: omit
    `experimental_config`; a profile then contains only the thread that starts the profiler."""
    from torch._C._profiler import _ExperimentalConfig

    return _ExperimentalConfig(profile_all_threads=all_threads)


def keep_gpu_busy(cycles: int) -> None:
    """Keep the GPU busy for a number of cycles. `torch.cuda._sleep`, torch 2.13. Fallback: launch a long matrix
    product."""
    torch.cuda._sleep(cycles)
