"""Time the parts of a training step one by one on one GPU: GEMMs, attention kernels, a layer, copies.

    python tools/bench/micro.py --config llama-8b-layers --json micro.json
    python tools/bench/micro.py --config tiny --cpu          # a trial in a few seconds, without a GPU

The shapes are taken from one layer of the model, with one sample in a micro-batch. Each row is a median over several
rounds of
calls: the milliseconds of one call on the device, TFLOP/s for GEMMs, and GB/s for the minimum number of bytes that the
call must read and write. If the host takes longer to launch a call than the device takes to run it, the row also shows
the launch time. A row that fails shows the error, and the other rows are still measured. If a failure makes the device
unusable for this process, another process measures the remaining rows.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from megatron.training.config.run_config import RunConfig
from tools.bench.device_time import Call, Part, Row, Size, copied, is_lost, products, random, timed
from tools.bench.gpu import PRECISIONS, SHAPES, chosen_device, config_of
from tools.bench.side_by_side import bench_parser, machine, write_json


def parts_of(config: RunConfig) -> Iterator[Part]:
    yield from gemms(config)
    yield from experts(config)
    yield from attention(config)
    yield from selected_keys(config)
    yield Part("layer", "forward and backward", layer, tflop=layer_tflop(config))
    yield from memory(config)


# Matrix products


def gemms(config: RunConfig) -> Iterator[Part]:
    """Yield forward GEMMs and weight-gradient GEMMs as parts to measure.

    There are three kinds of weight-gradient GEMMs: bf16 operands with a bf16 result, bf16 operands accumulated in fp32,
    and fp8 operands accumulated in fp32. The last kind is measured with each fp8 kernel that is available.
    """
    for name, size in products(config).items():
        rows, out, size_in = size
        work, weights = 2e-12 * rows * out * size_in, 1e-9 * out * size_in
        operands = 2e-9 * (rows * out + rows * size_in) + 2 * weights
        yield Part("GEMM bf16", f"{name} forward", partial(product, size), work, operands)
        for kind, dtype, more in ((", bf16", torch.bfloat16, 0), (" += fp32", torch.float32, 6)):
            into = partial(weight_product, size, dtype)
            yield Part("GEMM bf16", f"{name} weight gradient{kind}", into, work, operands + more * weights)
        for kernel in ("cublaslt", "triton", "torch"):
            added, once = partial(added_in_fp8, size, kernel), operands / 2 + 7 * weights
            yield Part("GEMM fp8", f"{name} weight gradient += fp32, {kernel}", added, work, once)


def product(size: Size, config: RunConfig, device: torch.device) -> Call:
    rows, out, size_in = size
    x = random(device, rows, size_in)
    weight = random(device, out, size_in)
    y = random(device, rows, out)
    return lambda: torch.mm(x, weight.t(), out=y)


def weight_product(size: Size, dtype: torch.dtype, config: RunConfig, device: torch.device) -> Call:
    """Return a call that computes a weight gradient with `add_product_`, as training does."""
    from megatron.core.tensor_parallel.weight_grad import add_product_

    rows, out, size_in = size
    x = random(device, rows, size_in)
    dy = random(device, rows, out)
    total = random(device, out, size_in, dtype=dtype)
    return lambda: add_product_(total, dy, x)


def added_in_fp8(size: Size, kernel: str, config: RunConfig, device: torch.device) -> Call:
    """Return a call that computes an fp8 weight gradient. Each operand has a single scale, as in fp8 layers."""
    from megatron.extensions.speed.fusions.gemm_choice import ProductShape, weight_grad_runs

    rows, out, size_in = size
    # On CPU, torch's own GEMM replaces the GPU kernels.
    run = kernel if device.type == "cuda" else "torch"
    return weight_grad_runs(ProductShape(out, size_in, rows), torch.float8_e5m2, "delayed", device)[run]


def experts(config: RunConfig) -> Iterator[Part]:
    """Yield parts that compute the weight gradients of all experts of `gpu.py --config experts`, one part for each
    kernel and each distribution of rows. There are two distributions: equal numbers of rows for all experts, and half
    of the rows for a single expert."""
    from megatron.extensions.speed.fusions.grouped_choice import LISTS, TILES

    shapes = expert_shapes(config, torch.device("cpu"))
    for outputs, inputs in shapes.expert_matrices:
        work = 2e-12 * shapes.expert_rows * outputs * inputs
        moved = 1e-9 * (2 * shapes.expert_rows * (outputs + inputs) + 8 * shapes.experts * outputs * inputs)
        for kernel in (*LISTS, TILES, "torch"):
            for even in (True, False):
                call = partial(expert_product, (outputs, inputs), kernel, even)
                name = f"{outputs} x {inputs} += fp32, {kernel}{'' if even else ', uneven'}"
                share = 1.0 if even else expert_share(shapes)
                yield Part("experts", name, call, work * share, moved)


def expert_shapes(config: RunConfig, device: torch.device) -> Any:
    """Return the shapes of one rank's experts, or of a few small experts in a trial."""
    from megatron.extensions.speed.fusions.kernel_choice import RunShapes

    if config.model.hidden_size > 64:
        return RunShapes.of(config_of(SHAPES["experts"], 1, 1, PRECISIONS["bf16"]), device)
    small: dict[str, Any] = {"experts": 4, "expert_rows": 256, "expert_matrices": ((48, 32), (32, 24))}
    return replace(RunShapes.of(config, device), **small)


def expert_share(shapes: Any) -> float:
    """Return the total number of rows of all experts in the uneven distribution, as a multiple of
    `shapes.expert_rows`."""
    from megatron.extensions.speed.fusions.grouped_choice import uneven

    return float(sum(uneven(shapes)) / shapes.expert_rows)


def expert_product(matrix: tuple[int, int], kernel: str, evenly: bool, config: RunConfig, device: torch.device) -> Call:
    from megatron.extensions.speed.fusions.grouped_choice import even, operands_of, uneven, weight_grad_runs

    shapes = expert_shapes(config, device)
    operands = operands_of(shapes, *matrix, even(shapes) if evenly else uneven(shapes))
    # On CPU, torch's own GEMMs replace the GPU kernels.
    return weight_grad_runs(shapes, *matrix, operands)[kernel if device.type == "cuda" else "torch"]


# Attention


def attention(config: RunConfig) -> Iterator[Part]:
    """Yield a part for the forward and backward pass of each attention kernel. The inputs are whole samples,
    context-parallel tiles, or samples with document boundaries (--reset-attention-mask). Attention with dropout is
    measured with the Triton kernel and with unfused torch operations. The TFLOP figures count only the unmasked half of
    the causal scores. The backward pass counts 2.5 times as much as the forward pass."""
    model = config.model
    pairs = config.training.micro_batch_size * model.seq_length**2 / 2 * model.num_attention_heads
    work = 3.5e-12 * 2 * pairs * (model.head_dim + model.value_head_dim)
    kernels: dict[str, dict[str, Any]] = {f"{name}, whole samples": {} for name in ("flash", "flash3", "cudnn")}
    kernels |= {f"{name}, whole samples": {} for name in ("fp8_flash3", "fp8_triton")}
    kernels |= {f"{name}, tiles of one of two ranks": {"ranks": 2} for name in ("flash", "flash3", "cudnn")}
    kernels |= {f"{name}, as documents": {"documents": True} for name in ("flash", "flash3")}
    # Triton's backward pass computes seven GEMMs instead of five; the additional ones are not counted.
    kernels |= {f"{name}, dropout 0.1": {"dropout": 0.1} for name in ("triton", "unfused")}
    kernels["triton, dropout 0.1, as documents"] = {"documents": True, "dropout": 0.1}
    for name, how in kernels.items():
        call = partial(attention_call, name.partition(",")[0], **how)
        yield Part(
            "attention", name, call, work / how.get("ranks", 1)
        )  # With two ranks, a rank computes half of the queries.


def attention_call(
    name: str,
    config: RunConfig,
    device: torch.device,
    ranks: int = 1,
    documents: bool = False,
    dropout: float = 0.0,
) -> Call:
    from megatron.core.attention.tiles import rank_spans
    from megatron.extensions.speed.fusions.attention.choice import attention_run, attention_shape

    shape = attention_shape(config)
    assert shape is not None
    # On CPU, plain torch operations replace the GPU kernels.
    backend = name if device.type == "cuda" else "unfused"
    queries = rank_spans(shape.length, 0, ranks) if ranks > 1 else None
    tiles = ranks > 1 or documents
    shape = replace(shape, tiles=tiles, documents=documents, queries=queries, dropout=dropout)
    return attention_run(shape, device, backend)


# Selected keys


SELECTION = ("scores_of_keys", "largest_scores", "attended_weights", "divergence")
"""Operations with which a sparse attention layer selects keys, without the attention to these keys."""


def selected_keys(config: RunConfig) -> Iterator[Part]:
    """Yield parts for sparse attention: attention to selected keys, and the operations that select the keys. Each part
    is measured with its kernel and with plain torch operations. The operands are the last queries of a sequence. At
    start-up, a training run times kernels with the same operands to choose between them. The TFLOP figures for
    attention count only the keys that each query attends to, and assume five GEMMs in the backward pass."""
    from megatron.extensions.attention.sparse_attention.flags import sparse_shapes
    from megatron.extensions.attention.sparse_attention.kernels.attention import SAMPLED

    work = {"attend_to_selected": 0.0, "selected_attention_gradients": 0.0, **dict.fromkeys(SELECTION, 0.0)}
    if not (shapes := sparse_shapes(config)):
        return
    for shape in shapes:
        queries = config.training.micro_batch_size * min(SAMPLED, shape.length) * shape.heads
        pairs = 2e-12 * queries * sum(each.most for each in shape.sets)
        work["attend_to_selected"] += pairs * (shape.width + shape.values)
        work["selected_attention_gradients"] += pairs * (3 * shape.width + 2 * shape.values)
    for name, tflop in work.items():
        for form in ("kernel", "torch"):
            yield Part("selected", f"{name}, {form}", partial(selected_call, name, form), tflop)


def selected_call(name: str, form: str, config: RunConfig, device: torch.device) -> Call:
    from megatron.core.kernels import KERNELS
    from megatron.extensions.speed.fusions.kernel_choice import FusedKernel, RunShapes

    kernel = KERNELS[name]
    assert isinstance(kernel, FusedKernel)
    operands = list(kernel.samples(RunShapes.of(config, device)))
    # On CPU, plain torch operations replace the GPU kernels.
    run = kernel if form == "kernel" and device.type == "cuda" else kernel.plain
    return lambda: [run(*each) for each in operands]


# Forward and backward pass of a layer, compiled as in training


def layer_tflop(config: RunConfig) -> float:
    """Return the TFLOP of the forward and backward pass of one layer. GEMMs and causal attention are counted."""
    model = config.model
    pairs = config.training.micro_batch_size * model.seq_length**2 / 2 * model.num_attention_heads
    of_products = sum(6e-12 * rows * out * i for name, (rows, out, i) in products(config).items() if name != "head")
    return of_products + 3e-12 * 2 * pairs * (model.head_dim + model.value_head_dim)


def layer(config: RunConfig, device: torch.device) -> Call:
    from megatron.core.batch import Batch
    from megatron.core.models.gpt.gpt_model import GPTModel, WeightSetup
    from megatron.core.pipeline_parallel.layout import Stage

    model, samples = config.model, config.training.micro_batch_size
    stage = GPTModel(
        model, config.parallel, stage=Stage((0,), False, False), weights=WeightSetup(device, initialize=False)
    )
    for parameter in stage.train().parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
    batch = Batch.of_tokens(torch.zeros(samples, model.seq_length, dtype=torch.int64, device=device))
    x = random(device, model.seq_length, samples, model.hidden_size).requires_grad_()
    grad = torch.ones_like(x)

    def call() -> object:
        x.grad = None  # otherwise, each call would add its gradient to the gradients of earlier calls
        return stage(x, batch).backward(grad)

    return call


def memory(config: RunConfig) -> Iterator[Part]:
    for size in (2**30, 2**26) if config.model.hidden_size > 64 else (2**20,):
        name = f"copy of {size / 2**20:.0f} MiB"
        yield Part("memory", name, partial(copied, size, False), gigabytes=2e-9 * size)
        yield Part("memory", f"{name} from the host", partial(copied, size, True), gigabytes=1e-9 * size)


def rows_of_another_process(argv: Sequence[str], done: int, seconds: float) -> list[dict[str, Any]]:
    """Measure the remaining parts in another process, skipping the first `done` parts, and return the rows of their
    results. The other process prints the rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        more = ["--skip", str(done), "--seconds", str(max(0.0, seconds)), "--json", str(path)]
        subprocess.run([sys.executable, __file__, *argv, *more], check=False)
        rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
        return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, 5, calls=(10, "of a round"))
    parser.add_argument("--config", choices=SHAPES, default="llama-8b-layers")
    parser.add_argument("--cpu", action="store_true", help="a trial without a GPU, with --config tiny")
    parser.add_argument("--only", nargs="+", help="groups of parts")
    parser.add_argument("--seconds", type=float, default=400.0, help="start no further part after this many seconds")
    parser.add_argument("--skip", type=int, default=0, help="number of parts to skip at the beginning")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    device = chosen_device(parser, args)
    config = config_of(SHAPES[args.config], 1, 1, PRECISIONS["bf16"] + (" --cpu" if args.cpu else ""))
    facts = machine("triton") | {"gpu": None if args.cpu else torch.cuda.get_device_name(device), "config": args.config}
    rows: list[Any] = []
    began = time.perf_counter()
    parts = [part for part in parts_of(config) if not args.only or part.group in args.only]
    for number, part in enumerate(parts[args.skip :], args.skip + 1):
        if time.perf_counter() - began > args.seconds:
            rows.append(Row(part.group, part.name, None, part.tflop, part.gigabytes, "no time was left"))
            continue
        row = timed(part, config, device, args.calls, args.rounds)
        rows.append(row)
        print(f"{row.group:<10} {row.name:<46} {row.result}", flush=True)
        write_json(args.json, facts, rows, ended=False)
        if row.failed is not None and is_lost(device):
            print("this process can no longer use the device: another process continues", flush=True)
            rows += rows_of_another_process(argv, number, args.seconds - (time.perf_counter() - began))
            break
    write_json(args.json, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
