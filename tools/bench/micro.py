"""Parts of a training step one by one on one GPU: matrix products, attention kernels, fp8 casts, regions, memory.

    python tools/bench/micro.py --config llama-8b-layers --json micro.json
    python tools/bench/micro.py --config tiny --cpu          # the whole of it in a few seconds, without a GPU

Shapes are those of one layer of the model with one sample in a micro-batch. Each row is the median of rounds of calls:
milliseconds of one call on the device, TFLOP/s where it multiplies, GB/s by the bytes that it must read and write at
least; where the host takes longer to start a call, that too. A row that fails keeps its error, and the others go on, in
another process if this one has lost its device.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from megatron.training.config.run_config import RunConfig
from tools.bench.device_time import Call, Part, Row, Size, copied, is_lost, product_in_fp8, products, random, timed
from tools.bench.gpu import PRECISIONS, SHAPES, chosen_device, config_of
from tools.bench.side_by_side import bench_parser, machine, write_json


def parts_of(config: RunConfig) -> Iterator[Part]:
    yield from gemms(config)
    yield from attention(config)
    yield from casts(config)
    yield from regions(config)
    yield from memory(config)


# Matrix products


def gemms(config: RunConfig) -> Iterator[Part]:
    """Forward, and the weight gradient as a bf16 product and as a sum in fp32; in fp8 with either accumulation."""
    for name, size in products(config).items():
        rows, out, size_in = size
        work, weights = 2e-12 * rows * out * size_in, 1e-9 * out * size_in
        operands = 2e-9 * (rows * out + rows * size_in) + 2 * weights
        yield Part("GEMM bf16", f"{name} forward", partial(product, size), work, operands)
        for kind, dtype, more in ((", bf16", torch.bfloat16, 0), (" += fp32", torch.float32, 6)):
            into = partial(weight_product, size, dtype)
            yield Part("GEMM bf16", f"{name} weight gradient{kind}", into, work, operands + more * weights)
        for kind, fast in (("exact", False), ("fast", True)):
            in_fp8 = partial(product_in_fp8, size, fast, torch.bfloat16)
            yield Part("GEMM fp8", f"{name} forward, {kind}", in_fp8, work, operands)
        to_fp32 = partial(product_in_fp8, (out, size_in, rows), False, torch.float32)
        yield Part("GEMM fp8", f"{name} weight gradient, exact to fp32", to_fp32, work, operands + 2 * weights)
        for kernel in ("cublaslt", "triton", "torch"):
            added, once = partial(added_in_fp8, size, kernel), operands / 2 + 7 * weights
            yield Part("GEMM fp8", f"{name} weight gradient += fp32, {kernel}", added, work, once)


def product(size: Size, config: RunConfig, device: torch.device) -> Call:
    rows, out, size_in = size
    x, weight, y = random(device, rows, size_in), random(device, out, size_in), random(device, rows, out)
    return lambda: torch.mm(x, weight.t(), out=y)


def weight_product(size: Size, dtype: torch.dtype, config: RunConfig, device: torch.device) -> Call:
    """As training does it: `add_product_`."""
    from megatron.core.tensor_parallel.weight_grad import add_product_

    rows, out, size_in = size
    x, dy, total = random(device, rows, size_in), random(device, rows, out), random(device, out, size_in, dtype=dtype)
    return lambda: add_product_(total, dy, x)


def added_in_fp8(size: Size, kernel: str, config: RunConfig, device: torch.device) -> Call:
    """As fp8 layers do it, with one scale for each operand."""
    from megatron.extensions.fusions.gemm_choice import ProductShape, weight_grad_runs

    rows, out, size_in = size
    # On CPU torch's own product stands in for the kernels of GPUs.
    run = kernel if device.type == "cuda" else "torch"
    return weight_grad_runs(ProductShape(out, size_in, rows), torch.float8_e5m2, "delayed", device)[run]


# Attention


def attention(config: RunConfig) -> Iterator[Part]:
    """Forward and backward by each kernel: of whole samples, by the tiles of context parallelism, as documents
    (--reset-attention-mask), each sample one, and with dropout by its own kernel and by plain torch. TFLOP of the
    causal half, three and a half times the forward's."""
    model = config.model
    pairs = config.training.micro_batch_size * model.seq_length**2 / 2 * model.num_attention_heads
    work = 3.5e-12 * 2 * pairs * (model.head_dim + model.value_head_dim)
    kernels: dict[str, dict[str, Any]] = {f"{name}, whole samples": {} for name in ("flash", "flash3", "cudnn")}
    kernels |= {f"{name}, tiles of one of two ranks": {"ranks": 2} for name in ("flash", "flash3", "cudnn")}
    kernels |= {f"{name}, as documents": {"documents": True} for name in ("flash", "flash3")}
    # The backward of triton does seven products instead of five, not counted here.
    kernels |= {f"{name}, dropout 0.1": {"dropout": 0.1} for name in ("triton", "unfused")}
    kernels["triton, dropout 0.1, as documents"] = {"documents": True, "dropout": 0.1}
    for name, how in kernels.items():
        call = partial(attention_call, name.partition(",")[0], **how)
        yield Part("attention", name, call, work / how.get("ranks", 1))  # the queries of one of two ranks are a half


def attention_call(
    name: str,
    config: RunConfig,
    device: torch.device,
    ranks: int = 1,
    documents: bool = False,
    dropout: float = 0.0,
) -> Call:
    from megatron.core.attention.tiles import rank_spans
    from megatron.extensions.fusions.attention.choice import attention_run, attention_shape

    shape = attention_shape(config)
    assert shape is not None
    # On CPU plain torch stands in for the kernels of GPUs.
    backend = name if device.type == "cuda" else "unfused"
    queries = rank_spans(shape.length, 0, ranks) if ranks > 1 else None
    tiles = ranks > 1 or documents
    shape = replace(shape, tiles=tiles, documents=documents, queries=queries, dropout=dropout)
    return attention_run(shape, device, backend)


# fp8


def casts(config: RunConfig) -> Iterator[Part]:
    """Work that the recipes add to the products: fc1 of a layer, its weight being cast already."""
    from megatron.extensions.fp8.build import RECIPES

    rows, out, size_in = products(config)["fc1"]
    x, dy, dw = (1e-9 * elements for elements in (rows * size_in, rows * out, out * size_in))
    work = 2e-12 * rows * out * size_in
    for recipe in RECIPES:
        for what, tflop, gigabytes in (
            ("cast of the input", 0.0, 4 * x),
            ("cast of the gradient", 0.0, 4 * dy),
            ("input gradient", work, dy + dw + 2 * x),
            ("weight gradient += fp32", work, dy + x + 8 * dw),
        ):
            yield Part("fp8", f"{recipe}, {what}", partial(in_recipe, recipe, what), tflop, gigabytes)


def in_recipe(recipe: str, what: str, config: RunConfig, device: torch.device) -> Call:
    """One of the calls that a linear layer makes, as it makes them."""
    from megatron.core.parallel_state import Axis
    from megatron.core.tensor_parallel.linear_gemms import Cuts, WeightCasts
    from megatron.extensions.fp8.build import Fp8Format
    from megatron.extensions.fp8.flags import Fp8Flags

    rows, out, size_in = products(config)["fc1"]
    casts = WeightCasts()
    fp8 = Fp8Format(Fp8Flags(fp8_format="hybrid", fp8_recipe=recipe), range(1), casts)
    gemms = fp8.linear("linear", Axis(), Cuts(), device, config.parallel.compiles(device.type))
    x, dy = random(device, rows, 1, size_in), random(device, rows, 1, out)
    weight, total = random(device, out, size_in), torch.zeros(out, size_in, device=device)
    of_x, of_dy = gemms.cast_input(x, True), gemms.cast_grad(dy, True)
    calls: dict[str, Call] = {
        "cast of the input": lambda: gemms.cast_input(x, True),
        "cast of the gradient": lambda: gemms.cast_grad(dy, True),
        "input gradient": lambda: gemms.input_grad(of_dy[0], weight),
        "weight gradient += fp32": lambda: gemms.add_weight_grad_(total, of_dy[1], of_x[1]),
    }
    keeping = casts.kept()
    keeping.__enter__()  # weights are cast once, for as long as the call lives

    def call() -> object:
        assert casts.keeps, keeping
        with torch.no_grad():
            return calls[what]()

    return call


# Modules of a layer and the loss, forward and backward, compiled as in training


def regions(config: RunConfig) -> Iterator[Part]:
    model = config.model
    rows = config.training.micro_batch_size * model.seq_length
    heads = model.query_projection_size + 2 * model.query_groups * model.head_dim
    yield Part("regions", "addition and norm", partial(of_module, "norm"), gigabytes=1.6e-8 * rows * model.hidden_size)
    yield Part("regions", "activation", partial(of_module, "activation"), gigabytes=1.6e-8 * rows * model.ffn_size)
    yield Part("regions", "rotary", rotary, gigabytes=8e-9 * rows * heads)
    yield Part("regions", "loss", loss, gigabytes=6e-9 * rows * model.padded_vocab_size)
    yield Part("regions", "layer", partial(of_module, "layer"), tflop=layer_tflop(config))


def layer_tflop(config: RunConfig) -> float:
    """Of the forward and backward of one layer: its products and causal attention."""
    model = config.model
    pairs = config.training.micro_batch_size * model.seq_length**2 / 2 * model.num_attention_heads
    of_products = sum(6e-12 * rows * out * i for name, (rows, out, i) in products(config).items() if name != "head")
    return of_products + 3e-12 * 2 * pairs * (model.head_dim + model.value_head_dim)


def of_module(kind: str, config: RunConfig, device: torch.device) -> Call:
    from megatron.core.batch import Batch
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.extensions.fusions.fused_norm import ResidualSum, add_and_norm

    model, samples = config.model, config.training.micro_batch_size
    stage = GPTModel(model, config.parallel, layers=(0,), first=False, last=False, device=device, initialize=False)
    for parameter in stage.train().parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
    layer: Any = stage.decoder.layers[0]
    batch = Batch.of_tokens(torch.zeros(samples, model.seq_length, dtype=torch.int64, device=device))
    width = model.ffn_size * (2 if model.gated else 1) if kind == "activation" else model.hidden_size
    update = random(device, model.seq_length, samples, width)
    run: Callable[[Tensor], Tensor | tuple[Tensor, ...]] = {
        "norm": lambda x: add_and_norm(layer.pre_mlp_layernorm, ResidualSum(x, update)),
        "activation": layer.mlp.activation,
        "layer": lambda x: stage(x, batch),
    }[kind]
    return forward_and_backward(run, random(device, model.seq_length, samples, width))


def rotary(config: RunConfig, device: torch.device) -> Call:
    from megatron.core.transformer.parameters import head_counts
    from megatron.extensions.fusions.split_heads import split_heads

    model, compiled = config.model, config.parallel.compiles(device.type)
    size = model.seq_length, config.training.micro_batch_size
    angles = torch.randn(size[0], 1, 1, model.head_dim // 2, device=device)
    tables, counts = (angles.cos().bfloat16(), angles.sin().bfloat16()), head_counts(model)

    def heads(qkv: Tensor) -> tuple[Tensor, ...]:
        return tuple(part for part in split_heads(qkv, counts, tables, compiled=compiled) if part is not None)

    return forward_and_backward(heads, random(device, *size, model.query_groups, sum(counts), model.head_dim))


def loss(config: RunConfig, device: torch.device) -> Call:
    from megatron.core.parallel_state import Axis
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    model, compiled = config.model, config.parallel.compiles(device.type)
    size = model.seq_length, config.training.micro_batch_size
    labels = torch.randint(model.padded_vocab_size, size, device=device)

    def of_logits(logits: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(logits * 1, labels, Axis(), model.padded_vocab_size, compiled).sum()

    return forward_and_backward(of_logits, random(device, *size, model.padded_vocab_size))


def forward_and_backward(function: Callable[[Any], Any], x: Tensor) -> Call:
    x = x.detach().requires_grad_()
    grads: list[Tensor] = []

    def call() -> object:
        x.grad = None  # or the next one would be added to it
        y = function(x)
        outputs = y if isinstance(y, tuple) else (y,)
        if not grads:
            grads.extend(torch.ones_like(output) for output in outputs)
        return torch.autograd.backward(outputs, grads)

    return call


def memory(config: RunConfig) -> Iterator[Part]:
    for size in (2**30, 2**26) if config.model.hidden_size > 64 else (2**20,):
        name = f"copy of {size / 2**20:.0f} MiB"
        yield Part("memory", name, partial(copied, size, False), gigabytes=2e-9 * size)
        yield Part("memory", f"{name} from the host", partial(copied, size, True), gigabytes=1e-9 * size)


def rows_of_another_process(argv: Sequence[str], done: int, seconds: float) -> list[dict[str, Any]]:
    """The rows of the parts behind the first `done`, which that process prints."""
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
    parser.add_argument("--seconds", type=float, default=400.0, help="after which no other part begins")
    parser.add_argument("--skip", type=int, default=0, help="number of first parts to skip")
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
            print("the device is lost to this process: another process continues", flush=True)
            rows += rows_of_another_process(argv, number, args.seconds - (time.perf_counter() - began))
            break
    write_json(args.json, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
