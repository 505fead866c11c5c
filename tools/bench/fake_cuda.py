"""A GPU that is not there: training steps on fake `cuda` tensors, and Inductor generating kernels for them.

Fake tensors have shapes, strides and a graph, but no values. torch runs their operations without a GPU; two parts of it
ask the driver nevertheless, and get an answer here: the autograd engine, which wants to know the stream of each
device, and Inductor, which reads the device's properties.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.extensions.planner.device_file import DeviceFile

GUARD = r"""
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cstring>

using c10::Device, c10::DeviceType, c10::Stream;

// One device, whose only stream is the default one.
struct OneDevice final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return Device(DeviceType::CUDA, 0); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Stream getStream(Device device) const noexcept override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
};

static bool no_context(const void*, c10::DeviceIndex) { return false; }

// The hooks of torch's CUDA library ask the driver whether a device is in use. Here they have a table of virtual
// functions of their own, a copy in which that one answers no.
extern "C" void pretend() {
  static const OneDevice device;
  static void* table[2 + 126];
  c10::impl::DeviceGuardImplRegistrar(DeviceType::CUDA, &device);
  auto asked = &at::CUDAHooksInterface::hasPrimaryContext;
  std::size_t offset;
  std::memcpy(&offset, &asked, sizeof offset);
  auto hooks = reinterpret_cast<void***>(const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks()));
  std::memcpy(table, *hooks - 2, sizeof table);
  table[2 + (offset - 1) / sizeof(void*)] = reinterpret_cast<void*>(&no_context);
  *hooks = table + 2;
}
"""


def unavailable() -> str | None:
    """Why steps on fake CUDA tensors cannot run here; None if they can."""
    if torch.version.cuda is None:
        return f"needs torch's CUDA build (no GPU): this is torch {torch.__version__}"
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which comes with torch's CUDA build (no GPU): pip install triton"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "needs a C++ compiler: install g++, or set CXX"
    return None


def _build_guard() -> ctypes.CDLL:
    """Compiles `GUARD` against the headers of this torch, once."""
    root = Path(torch.__file__).parent
    name = hashlib.sha256(f"{torch.__version__} {root} {GUARD}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"megatron_fake_cuda_{os.getuid()}"
    library = folder / f"{name}.so"
    if not library.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            source, made = Path(work) / "guard.cpp", Path(work) / "guard.so"
            source.write_text(GUARD)
            libraries = [str(root / "lib" / name) for name in ("libc10.so", "libtorch_cpu.so")]
            command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{root / 'include'}"]
            subprocess.run([*command, "-o", str(made), str(source), *libraries], check=True)
            os.replace(made, library)
    return ctypes.CDLL(str(library))


class _NoEvent:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...


class _NoStream:
    """Operations of fake tensors are in the order of the program, whatever stream they are launched on."""

    def __init__(self, device: Any = None, **kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)

    def record_event(self, event: Any = None) -> _NoEvent:
        return _NoEvent()

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


class _Answers(TorchDispatchMode):
    """What fake tensors cannot do: numbers read from them are 0, and operations whose shapes torch does not know."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default:
            return 0.0 if args[0].is_floating_point() else 0
        if func._overloadpacket is aten.addmm and func._overloadname.startswith("dtype"):
            out = kwargs.get("out")
            return args[1].new_empty(args[1].shape[0], args[2].shape[1], dtype=args[3]) if out is None else out
        if func is aten._grouped_mm.default and args[1].ndim == 3 and args[0].ndim == 2:
            return args[0].new_empty(args[0].shape[0], args[1].shape[-1], dtype=args[0].dtype)
        return func(*args, **kwargs)


class _OnHost(TorchDispatchMode):
    """Real constants that Inductor folds are made on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)


def _attention_by(kernel: str) -> Any:
    """F.scaled_dot_product_attention by one kernel: torch's own choice would ask the device."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None or dropout_p:
            raise NotImplementedError("attention with a mask or dropout is not one of the kernels counted here")
        if kernel == "cudnn":
            return torch.ops.aten._scaled_dot_product_cudnn_attention(
                query, key, value, None, True, 0.0, is_causal, False, scale=scale
            )[0]
        return torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scale
        )[0]

    return attention


def _properties(device: DeviceFile) -> SimpleNamespace:
    """What Inductor and Triton ask about a device."""
    major, minor = device.capability
    return SimpleNamespace(
        name=device.name,
        major=major,
        minor=minor,
        multi_processor_count=device.multiprocessors,
        total_memory=int(device.memory_gib * 2**30),
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        warp_size=32,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=device.shared_memory_kib * 1024,
        shared_memory_per_multiprocessor=(device.shared_memory_kib + 1) * 1024,
        L2_cache_size=int(device.cache_mib * 2**20),
        gcnArchName="",
        uuid="none",
    )


@contextmanager
def fake_cuda(device: DeviceFile, attention: str = "cudnn") -> Iterator[FakeTensorMode]:
    """Within it tensors are fake, `cuda:0` is `device`, and attention runs by cuDNN or FlashAttention.

    Call it in a process of its own: the autograd engine keeps what it was told. Raises RuntimeError if `unavailable`.
    """
    if (problem := unavailable()) is not None:
        raise RuntimeError(problem)
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    _build_guard().pretend()
    properties = _properties(device)
    capability = device.capability
    worker = SimpleNamespace(
        get_device_properties=lambda device=None: properties, current_device=lambda: 0, set_device=lambda device: None
    )
    create: Any = DeviceProperties.create
    deduce = UniformValueConstantFolder._deduce_value

    def deduce_on_host(self: Any, node: Any) -> Any:
        with _OnHost():
            return deduce(self, node)

    with ExitStack() as stack:

        def patch(target: Any, **values: Any) -> None:
            for name, value in values.items():
                stack.enter_context(mock.patch.object(target, name, value))

        # torch.cuda.is_available stays False: FakeTensorMode then touches no driver.
        patch(
            torch.cuda,
            device_count=lambda: 1,
            current_device=lambda: 0,
            set_device=lambda device: None,
            get_device_name=lambda device=None: device_name,
            get_device_capability=lambda device=None: capability,
            get_device_properties=lambda device=None: properties,
            synchronize=lambda device=None: None,
            Event=_NoEvent,
            Stream=_NoStream,
            current_stream=lambda device=None: _NoStream(),
            stream=lambda stream: nullcontext(),
        )
        device_name = device.name
        patch(
            CudaInterface,
            Worker=worker,
            get_device_properties=staticmethod(lambda device=None: properties),
            get_compute_capability=staticmethod(lambda device=None: 10 * capability[0] + capability[1]),
            is_available=staticmethod(lambda: True),
            current_device=staticmethod(lambda: 0),
            device_count=staticmethod(lambda: 1),
            is_bf16_supported=staticmethod(lambda including_emulation=False: capability[0] >= 8),
            is_triton_capable=staticmethod(lambda device=None: True),
            raise_if_triton_unavailable=staticmethod(lambda device=None: None),
        )
        target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
        patch(driver, _active=SimpleNamespace(get_current_target=lambda: target))
        patch(UniformValueConstantFolder, _deduce_value=deduce_on_host)
        patch(F, scaled_dot_product_attention=_attention_by(attention))
        patch(Tensor, pin_memory=lambda self, *args: self, tolist=_zeros)
        stack.callback(getattr(create, "cache_clear", lambda: None))
        stack.enter_context(config.patch(compile_threads=1))  # else processes that compile are started
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Answers())
        yield mode


def _zeros(x: Tensor) -> Any:
    """`tolist` of a tensor without values."""
    if x.ndim == 0:
        return 0.0 if x.is_floating_point() else 0
    return [_zeros(row) for row in x]
