"""Run the CUDA path of a training step on a machine without a GPU. Tensors are fake `cuda` tensors, and Inductor
generates code for the selected device.

    python tools/bench/fake_cuda.py --config llama-8b-layers --precision fp8 --fp8-recipe rowwise

The tool prints the graphs of each compiled region. The exit code is 1 if a region ran uncompiled, for example because
it reached its limit of variants. The exit code is 2 if torch's CUDA build, Triton or a C++ compiler is missing.

Fake tensors have shapes, strides and a graph, but no values. torch can run operations on them without a GPU, except
that two components query the driver: the autograd engine asks for the stream of each device, and Inductor reads the
device properties. This tool answers both queries in place of the driver.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from megatron.core.compiled_regions import RECOMPILE_LIMIT, CompiledRegion
from megatron.core.parallel_state import ParallelState
from megatron.core.torch_private import FakeTensorMode, TorchDispatchMode, cudnn_attention
from megatron.extensions import load
from megatron.extensions.plan.planner.device_file import DeviceFile, device_names, read_device
from megatron.extensions.plan.planner.fake_stage import NoValues
from megatron.training.config.run_config import RunConfig
from megatron.training.foreign import replaced
from megatron.training.hooks import Parts
from tools.bench.gpu import SHAPES, add_model_flags, config_of, model_flags

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
    """Return the reason why steps on fake CUDA tensors cannot run on this machine; None if they can."""
    if torch.version.cuda is None:
        return f"needs torch's CUDA build (no GPU): this is torch {torch.__version__}"
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which comes with torch's CUDA build (no GPU): pip install triton"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "needs a C++ compiler: install g++, or set CXX"
    return None


def _build_guard() -> ctypes.CDLL:
    """Compile the C++ source `GUARD` against the headers of the installed torch, unless it was compiled before, and
    load the library."""
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


def _zeros(x: Tensor) -> Any:
    """Replacement for `Tensor.tolist` that returns zeros, because fake tensors have no values."""
    return np.zeros(tuple(x.shape), float if x.is_floating_point() else int).tolist()


class _OnHost(TorchDispatchMode):
    """Dispatch mode that creates real CPU tensors, because Inductor folds constants on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Replacement of F.scaled_dot_product_attention that always uses the cuDNN kernel, because torch would query the
    device to choose a kernel."""
    assert attn_mask is None and not dropout_p
    return cudnn_attention(query, key, value, None, True, 0.0, is_causal, False, scale=scale)[0]


def _properties(device: DeviceFile) -> SimpleNamespace:
    """Return the properties that Inductor and Triton read from a device."""
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


class _Idle:
    """Placeholder for a CUDA stream or event, whose methods return immediately."""

    device = torch.device("cuda", 0)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self


def _of_torch_cuda(properties: Any, capability: tuple[int, int]) -> dict[str, Any]:
    """Return replacements for functions of `torch.cuda`, as on a machine with one device. Operations on fake tensors
    run in program order, regardless of the stream."""
    stream = _Idle()
    return {
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: properties,
        "synchronize": lambda device=None: None,
        "Event": _Idle,
        "Stream": lambda device=None, **kwargs: stream,
        "current_stream": lambda device=None: stream,
        "stream": lambda stream: nullcontext(),
    }


def _of_interface(properties: Any, capability: tuple[int, int]) -> dict[str, Any]:
    """Return attributes of Dynamo's `CudaInterface` for one device."""
    worker = SimpleNamespace(
        get_device_properties=lambda device=None: properties, current_device=lambda: 0, set_device=lambda device: None
    )
    return {
        "Worker": worker,
        "get_device_properties": staticmethod(lambda device=None: properties),
        "get_compute_capability": staticmethod(lambda device=None: 10 * capability[0] + capability[1]),
        "is_available": staticmethod(lambda: True),
        "current_device": staticmethod(lambda: 0),
        "device_count": staticmethod(lambda: 1),
        "is_bf16_supported": staticmethod(lambda including_emulation=False: capability[0] >= 8),
        "is_triton_capable": staticmethod(lambda device=None: True),
        "raise_if_triton_unavailable": staticmethod(lambda device=None: None),
    }


@contextmanager
def fake_cuda(device: DeviceFile) -> Iterator[FakeTensorMode]:
    """Context in which tensors are fake, `cuda:0` has the properties of `device`, and attention uses cuDNN.

    Use this context in a separate process, because the autograd engine caches what it first reads from the driver.
    Raises RuntimeError if `unavailable` returns a reason.
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
    assert capability is not None, "name or path of a GPU's device file"
    create: Any = DeviceProperties.create
    deduce = UniformValueConstantFolder._deduce_value

    def deduce_on_host(self: Any, node: Any) -> Any:
        with _OnHost():
            return deduce(self, node)

    with ExitStack() as stack:

        def patch(target: Any, **values: Any) -> None:
            for name, value in values.items():
                stack.enter_context(replaced((target, name, value)))

        # torch.cuda.is_available stays False, so that FakeTensorMode does not query the driver.
        patch(torch.cuda, **_of_torch_cuda(properties, capability))
        patch(CudaInterface, **_of_interface(properties, capability))
        target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
        patch(driver, _active=SimpleNamespace(get_current_target=lambda: target))
        patch(UniformValueConstantFolder, _deduce_value=deduce_on_host)
        patch(F, scaled_dot_product_attention=_attention)
        patch(Tensor, pin_memory=lambda self, *args: self, tolist=_zeros)
        stack.callback(getattr(create, "cache_clear", lambda: None))
        stack.enter_context(config.patch(compile_threads=1))  # With one thread, Inductor compiles in this process.
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(NoValues())
        yield mode


@dataclass
class RegionUse:
    """Numbers of calls, compiled graphs and uncompiled calls of a compiled region. Forward and backward graphs are
    counted separately."""

    name: str
    calls: int = 0
    graphs: int = 0
    eager_calls: int = 0


@contextmanager
def watched_regions(mode: FakeTensorMode) -> Iterator[dict[str, RegionUse]]:
    """Within the context, compile each region to device code when the region is called, and run it on fake tensors. The
    yielded dictionary counts the uses of each region, keyed by its name."""
    uses: dict[str, RegionUse] = {}

    @cache
    def compiled(region: CompiledRegion) -> Callable[..., Any]:
        function = region.function
        name = f"{function.__module__.removeprefix('megatron.core.')}.{function.__qualname__}"
        return _watched(function, region.static, uses.setdefault(name, RegionUse(name)), mode)

    limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    with _Regions(compiled), torch._dynamo.config.patch(recompile_limit=limit):
        yield uses


class _Regions(TorchFunctionMode):
    """Torch function mode that calls `compiled(region)` for each compiled region, and runs the returned function in
    place of the region."""

    def __init__(self, compiled: Callable[[CompiledRegion], Callable[..., Any]]) -> None:
        super().__init__()
        self.compiled = compiled

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if type(func) is CompiledRegion:
            return self.compiled(func)(*args)
        return func(*args, **(kwargs or {}))


def _watched(function: Callable[..., Any], static: bool, use: RegionUse, mode: FakeTensorMode) -> Callable[..., Any]:
    """Compile a region with torch.compile. Inductor generates code for each graph of the region, but a call only
    propagates fake tensors through the graph and does not run the code."""
    from torch._inductor import compile_fx

    ran = [False]

    def compile_graph(module: torch.fx.GraphModule, inputs: Sequence[Any], **settings: Any) -> Any:
        use.graphs += 1
        generate_code(copy.deepcopy(module), inputs, settings)

        def run(inputs: list[Any]) -> Any:
            ran[0] = True
            given = list(inputs)
            inputs.clear()
            with mode:
                return module(*given)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_fx.compile_fx(module, inputs, inner_compile=compile_graph)

    compiled = torch.compile(function, backend=backend, dynamic=False if static else None)

    @wraps(function)
    def call(*args: Any) -> Any:
        use.calls += 1
        ran[0] = False
        with _disable_current_modes():
            out = compiled(*args)
        if ran[0]:
            return out
        use.eager_calls += 1
        return function(*args)

    return call


class _Generated(BaseException):
    """Exception that ends a compilation once the code is generated."""


def generate_code(module: torch.fx.GraphModule, inputs: Sequence[Any], settings: dict[str, Any]) -> None:
    """Run Inductor on a graph until the source code of its Triton kernels is generated. Errors of Inductor
    propagate."""
    from torch._inductor import config
    from torch._inductor.compile_fx import _InProcessFxCompile
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    def generate(graph: Any) -> Any:
        graph.codegen()
        raise _Generated

    given = {"cudagraphs": BoxedBool(False), "is_inference": False, **settings}
    with (
        replaced((GraphLowering, "compile_to_module", generate)),
        config.patch(force_disable_caches=True, compile_threads=1),
        V.set_debug_handler(DebugContext()),
    ):
        try:
            _InProcessFxCompile().codegen_and_compile(module, inputs, (), given)
        except _Generated:
            return
    raise AssertionError("Inductor generated no module")


def _with_given_kernels(config: RunConfig) -> Parts:
    """Return the components of a run without the callback that times and chooses kernels."""
    from megatron.extensions.speed.fusions.hooks import KernelChoice

    parts = Parts().with_registered(config)
    return Parts([each for each in parts.callbacks if not isinstance(each, KernelChoice)], parts.metrics)


def run_step(config: RunConfig) -> None:
    """Run the first step of pretrain_gpt.py within `fake_cuda`."""
    from megatron.training.initialize import Runtime, set_determinism
    from megatron.training.reliability.launch import Launch
    from megatron.training.setup import build_run
    from megatron.training.train_step import train_step

    set_determinism(config)
    run = build_run(config, Runtime(Launch(), torch.device("cuda", 0), ParallelState()), _with_given_kernels(config))
    train_step(run)
    run.data.close()


def main(argv: Sequence[str] | None = None) -> int:
    load()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_flags(parser)
    parser.add_argument("--device", default="h100", help=f"{', '.join(device_names())}, or a device file")
    parser.set_defaults(layers=2)
    args = parser.parse_args(argv)
    if (problem := unavailable()) is not None:
        print(f"{Path(__file__).name} {problem}", file=sys.stderr)
        return 2
    try:
        device = read_device(args.device)
        config = config_of(replace(SHAPES[args.config], micro_batches=2), args.layers, 1, model_flags(args))
    except ValueError as error:
        parser.error(str(error))
    with fake_cuda(device) as mode, watched_regions(mode) as uses:
        run_step(config)
    for use in uses.values():
        eager = f"; UNCOMPILED in {use.eager_calls} calls" if use.eager_calls else ""
        print(f"  {use.name}: {use.graphs} graphs, {use.calls} calls{eager}")
    uncompiled = [use.name for use in uses.values() if use.eager_calls]
    print(f"regions that ran uncompiled: {', '.join(uncompiled) or 'none'}")
    return 1 if uncompiled else 0


if __name__ == "__main__":
    sys.exit(main())
