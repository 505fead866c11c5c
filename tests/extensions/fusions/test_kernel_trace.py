"""Counting the kernels of a step: bytes of operations on fake CUDA tensors, groups, and sums of steps.

No GPU and no CUDA build of torch; `tests/cli/test_gpu_bytes.py` traces whole steps where that build is installed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import megatron.extensions.fusions.kernels.norms  # noqa: F401  (its operators)
from megatron.core.tensor_parallel.linear_gemms import residual_gemm
from megatron.extensions.planner.device_file import read_device
from tools.bench.gpu_bytes import parts_of, whole_step
from tools.bench.kernel_groups import (
    GROUPS,
    AttentionWork,
    Gemm,
    Kernel,
    Sums,
    combined,
    group_of_op,
    group_of_region,
    table_of,
    total,
)
from tools.bench.kernel_trace import KernelCounter, Trace, loops_that_load, size_of

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def made(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def kernels_of(work: Callable[[], object], main_grads: tuple[Tensor, ...] = (), fp8: bool = False) -> list[Kernel]:
    trace = Trace()
    counter = KernelCounter(trace, cache=50 * 2**20)
    counter.main_grads, counter.fp8 = {x.untyped_storage()._cdata for x in main_grads}, fp8
    with counter:
        work()
    return list(trace.kernels.elements())


def moved(work: Callable[[], object]) -> tuple[int, int]:
    (kernel,) = kernels_of(work)
    return kernel.read, kernel.written


def test_bytes_of_element_wise_operations() -> None:
    x, y = made(64, 32), made(64, 32)
    whole = 64 * 32 * 2
    assert moved(lambda: x + y) == (2 * whole, whole)
    assert moved(lambda: x + x) == (whole, whole)
    assert moved(lambda: x.add_(y)) == (2 * whole, whole)
    assert moved(lambda: x.zero_()) == (0, whole)
    assert moved(lambda: torch.add(x, y, out=made(64, 32))) == (2 * whole, whole)
    assert moved(lambda: x.to(FP32)) == (whole, 2 * whole)
    assert moved(lambda: x + y.narrow(0, 0, 1).expand(64, -1)) == (whole + 64, whole)
    assert moved(lambda: x.narrow(1, 0, 16) + 1) == (whole // 2, whole // 2)
    assert size_of(made(64, 1).expand(64, 32)) == 128


def test_views_allocation_and_the_host_cost_nothing() -> None:
    x = made(64, 32)
    assert kernels_of(lambda: (x.t(), x.view(-1), x.narrow(0, 3, 9), x.detach(), torch.empty_like(x), x.chunk(2))) == []
    assert kernels_of(lambda: torch.ones(8) + 1) == []


def test_lookups_touch_some_rows_only() -> None:
    table, ids = made(1000, 32), torch.zeros(8, dtype=torch.int64, device="cuda")
    rows = 8 * 32 * 2
    assert moved(lambda: F.embedding(ids, table)) == (rows + 64, rows)
    assert moved(lambda: torch.ops.aten.index(table, [ids])) == (rows + 64, rows)
    grads, sums = made(8, 32, dtype=FP32), made(1000, 32, dtype=FP32)
    put = torch.ops.aten._index_put_impl_
    assert moved(lambda: put(sums, [ids], grads, accumulate=True, unsafe=True)) == (4 * rows + 64, 2 * rows)


def test_products_and_the_sums_that_they_add_to() -> None:
    x, w = made(128, 64), made(256, 64)
    (product,) = kernels_of(lambda: F.linear(x, w))
    assert product.work == Gemm("bf16", 1, 128, 256, 64) and product.flops == 2 * 128 * 256 * 64
    assert (product.read, product.written) == (2 * 64 * (128 + 256), 2 * 128 * 256)
    sums = made(256, 64, dtype=FP32)
    product, added = kernels_of(lambda: sums.addmm_(made(128, 256, dtype=FP32).t(), made(128, 64, dtype=FP32)))
    assert product.work == Gemm("fp32", 1, 256, 64, 128) and product.written == 0
    assert (added.group, added.launches, added.read, added.written) == ("weight-gradient sums", 0, 65536, 65536)


def test_a_residual_addend_is_a_part_of_its_product() -> None:
    x, w, stream, bias = made(128, 64), made(256, 64), made(128, 256), made(256)
    product, addend = kernels_of(lambda: residual_gemm(x, w, stream, bias))
    assert product.work == Gemm("bf16", 1, 128, 256, 64)
    assert (product.read, product.written) == (2 * 64 * (128 + 256) + 2 * 256, 2 * 128 * 256)
    assert (addend.group, addend.launches, addend.read, addend.written) == ("residual addends", 0, 2 * 128 * 256, 0)


def test_additions_to_gradient_buffers_have_a_group_of_their_own() -> None:
    buffer, grad = made(64, dtype=FP32), made(32, dtype=FP32)
    for fp8, group in ((False, "weight-gradient sums"), (True, "fp8 weight-gradient adds")):
        (kernel,) = kernels_of(lambda: buffer.narrow(0, 0, 32).add_(grad), (buffer,), fp8)
        assert (kernel.group, kernel.read, kernel.written) == (group, 256, 128)


def test_kernels_of_our_own_count_their_last_small_ones() -> None:
    x, weight, inverse = made(256, 64), made(64), made(256, 1, dtype=FP32)
    whole, small = 256 * 64 * 2, 64 * 2
    gradients = torch.ops.megatron.norm_gradients
    operands = x, made(256, 64), made(256, 64), weight, [inverse], False, True
    first, last = kernels_of(lambda: gradients(*operands, None, None, False, False, torch.float8_e5m2))
    assert (first.group, first.read, first.written) == ("norm", 3 * whole + small + 256 * 4, whole + 2 * small)
    assert (last.group, last.launches, last.read + last.written) == ("norm", 1, 0)
    scale = made(dtype=FP32)
    first, last = kernels_of(lambda: gradients(*operands, scale, None, True, True, torch.float8_e5m2))
    assert first.group == last.group == "fp8 casts" and first.written == 2 * whole + 2 * small + 4
    assert last.launches == 1, "of sums; the last program has the maximum"


def test_attention_counts_half_of_the_square_and_five_products_backward() -> None:
    q, k = made(1, 4, 512, 64), made(1, 2, 512, 64)

    def forward() -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, k, 0.0, True, False)[0]

    (kernel,) = kernels_of(forward)
    assert kernel.group == "attention"
    assert kernel.work == AttentionWork("flash", 4 * 512 * 512 * (64 + 64), 64, 512, backward=False)
    assert kernel.read == 2 * 512 * 64 * (4 + 2)  # keys and values are one tensor here


@torch.library.custom_op("megatron::cast_for_test", mutates_args=("noted",))
def cast_for_test(x: Tensor, noted: Tensor) -> Tensor:
    raise NotImplementedError


@cast_for_test.register_fake
def _(x: Tensor, noted: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn)


def test_own_kernels_are_custom_operators_of_the_library() -> None:
    x, noted = made(64, 32), made(1, dtype=FP32)
    (kernel,) = kernels_of(lambda: cast_for_test(x, noted))
    assert (kernel.group, kernel.launches) == ("fp8 casts", 1)
    assert (kernel.read, kernel.written) == (64 * 32 * 2 + 4, 64 * 32 + 4)


@pytest.mark.parametrize(
    ("namespace", "name", "file", "group"),
    [
        ("aten", "add", "core/transformer/layer.py", "residual adds"),
        ("aten", "add", "core/pipeline_parallel/executor.py", "residual adds"),
        ("aten", "clone", "core/transformer/self_attention.py", "rotary, copies"),
        ("aten", "_foreach_norm", "core/optimizer/clip_grads.py", "optimizer"),
        ("aten", "_fused_rms_norm", "core/transformer/norm.py", "norm"),
        ("aten", "sub", "core/tensor_parallel/cross_entropy.py", "loss"),
        ("aten", "topk", "core/moe/router.py", "experts"),
        ("c10d", "allreduce_", "core/collectives.py", "communication"),
        ("aten", "sinc", "", "other"),
    ],
)
def test_groups_of_operations(namespace: str, name: str, file: str, group: str) -> None:
    assert group_of_op(namespace, name, (file, "forward")) == group
    assert group in GROUPS


def test_groups_of_regions() -> None:
    assert group_of_region("fp8.casts.cast_by_amax") == "fp8 casts"
    assert group_of_region("fp8.casts.transposed_bytes") == "fp8 transposes"
    assert group_of_region("transformer.activations._swiglu_forward") == "activation"
    assert group_of_region("transformer.self_attention.gated_output") == "rotary, copies"
    assert group_of_region("tensor_parallel.cross_entropy._exponentials_") == "loss"


def test_loops_of_a_triton_kernel_that_read_a_buffer() -> None:
    source = """
def triton_red(in_ptr0, in_ptr1, out_ptr0):
    tmp9 = tl.load(in_ptr1 + (x0))
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp0 = tl.load(in_ptr0 + (r0))
        tmp1 = tl.load(in_ptr0 + (r0 + 1))
    tmp3 = tl.sum(_tmp3, 1)[:, None]
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp4 = tl.load(in_ptr0 + (r0))
        tl.store(out_ptr0 + (r0), tmp4)
"""
    assert loops_that_load(source, {"x": "in_ptr0", "scale": "in_ptr1"}) == {"x": 2, "scale": 0}


def test_a_step_is_what_its_layers_micro_batches_and_the_rest_do() -> None:
    device = read_device("h100")
    numbers = random.Random(1)
    parts = {
        name: Kernel("norm", name, numbers.randrange(10**8), numbers.randrange(10**8))
        for name in ("layer", "layer, once a step", "micro-batch", "step")
    }

    def step(layers: int, batches: int) -> Counter[Kernel]:
        times = (layers * batches, layers, batches, 1)
        return Counter(dict(zip(parts.values(), times, strict=True)))

    tables = {(layers, batches): table_of(step(layers, batches), device) for layers in (1, 2) for batches in (1, 2)}
    found = parts_of(tables)
    for name, kernel in parts.items():
        ((_, kernel_name),) = found[name]
        assert kernel_name == name and total(found[name]).read == pytest.approx(kernel.read)
    seven = total(whole_step(found, 7, 5))
    expected = total(table_of(step(7, 5), device))
    assert list(vars(seven).values()) == pytest.approx(list(vars(expected).values()))


def test_predicted_times() -> None:
    device = read_device("h100")
    kernel = Kernel("norm", "n", 10**9, 10**9)
    assert kernel.predicted_us(device) == pytest.approx(2e9 / 2.95e6)
    assert Kernel("norm", "n", 8, 8, launches=2).predicted_us(device) == 2 * device.kernel_floor_us
    assert Kernel("weight-gradient sums", "s", 10**9, 10**9, launches=0).predicted_us(device) == pytest.approx(
        device.epilogue_exposed * 2e9 / 2.95e6
    )
    narrow = Kernel("GEMMs", "g", 10**9, 10**9, Gemm("bf16", 1, 8192, 64, 64))
    assert narrow.predicted_us(device) == pytest.approx(2e9 / 2.95e6)
    table = table_of(Counter({kernel: 3}), device)
    assert table["norm", "n"] == Sums(3, 3 * 10**9, 3 * 10**9, 0.0, 3 * (2e9 / 2.95e6 + device.launch_gap_us))
    assert combined([(table, 1), (table, -1)]) == {}
