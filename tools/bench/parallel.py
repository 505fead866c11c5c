"""Tokens per second of each kind of parallelism over gloo processes, beside torch's own and beside one process.

    python tools/bench/parallel.py                  # 2 processes of one thread, against one process of two
    python tools/bench/parallel.py --ranks 4 --only "ours TP" "torch DTensor TP"

A Llama-style model (8 layers, hidden size 384, 256 tokens a sequence, a vocabulary of 8192), 8 micro-batches of one
sequence a step, float32, the optimizer's step included. Torch's side is a plain model of the same shape with
DistributedDataParallel, fully_shard (FSDP2), DTensor tensor parallelism, and torch.distributed.pipelining. The
contestants of a kind of parallelism are started together and then take turns, one contestant at a time, each kind with
a process of its own to be compared with.

Two more show what this machine allows at most: processes that share the batch out but never speak to each other, and
tensor parallelism whose layers leave their collectives out (its results are nonsense, its work is all there).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench.side_by_side import (
    Contestant,
    Round,
    Spread,
    bench_parser,
    interleaved,
    machine,
    own_step,
    positive,
    say_machine,
    timed,
    write_json,
)

LAYERS, HIDDEN, HEADS, FFN, SEQ, VOCAB, MICRO_BATCHES = 8, 384, 4, 1024, 256, 8192, 8
TOKENS = MICRO_BATCHES * SEQ
"""Of one step, over all ranks."""

MODEL = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --ffn-hidden-size {FFN} "
    f"--seq-length {SEQ} --max-position-embeddings {SEQ} --vocab-size {VOCAB} --micro-batch-size 1 "
    f"--global-batch-size {MICRO_BATCHES} --attention-dropout 0 --hidden-dropout 0 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --mock-data "
    "--train-iters 1000000 --eval-iters 0 --lr 1e-4 --cpu"
)


def our_layouts(n: int) -> dict[str, str]:
    """Name -> flags, for n ranks."""
    pipelines = {
        f"ours PP {schedule}": f"--pp {n} --pipeline-schedule {schedule}"
        for schedule in ("1f1b", "interleaved", "zb-h1", "zb-v")
    }
    return {
        "ours TP": f"--tp {n}",
        "ours TP+SP": f"--tp {n} --sequence-parallel",
        "ours TP+SP overlapped": f"--tp {n} --sequence-parallel --tp-comm-overlap",
        **pipelines,
        "ours DP": f"--dp {n} --no-use-distributed-optimizer --overlap-grad-reduce",
        "ours ZeRO-1": f"--dp {n} --overlap-grad-reduce --overlap-param-gather",
        "ours ZeRO-2": f"--dp {n} --data-parallel-sharding-strategy optim_grads",
        "ours ZeRO-3": f"--dp {n} --data-parallel-sharding-strategy optim_grads_params",
        "ours CP": f"--cp {n}",
    }


def ours(flags: str, steps: int) -> Round:
    return timed(own_step(f"{MODEL} {flags}".split()), steps, TOKENS)


def silent(ranks: int, steps: int) -> Round:
    """Data parallelism without communication: each process is a world of its own, with its part of the batch."""
    os.environ |= {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    return ours(f"--global-batch-size {MICRO_BATCHES // ranks}", steps)


def silent_tensor_parallel(flags: str, steps: int) -> Round:
    from megatron.core.tensor_parallel import layers

    layers.COLUMN = layers.ROW = layers.LOCAL
    return ours(flags, steps)


def torchs(kind: str, steps: int) -> Round:
    """Torch's own of that kind: what a user writes from its documentation."""
    import torch
    import torch.distributed as dist

    from tools.bench.plain_llama import Llama, Shape

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = Llama(Shape(LAYERS, HIDDEN, HEADS, FFN, SEQ, VOCAB))
    batches = torch.randint(VOCAB, (8, MICRO_BATCHES, SEQ + 1))
    return timed(STEPS[kind](model, batches), steps, TOKENS)


def loss_of(logits: Any, labels: Any) -> Any:
    """Mean over a micro-batch's tokens, over the number of micro-batches."""
    import torch.nn.functional as F

    return F.cross_entropy(logits.flatten(0, -2), labels.flatten()) / MICRO_BATCHES


def turns(batches: Any) -> Callable[[], Any]:
    """The next global batch [micro-batches, s + 1], again and again."""
    place = -1

    def take() -> Any:
        nonlocal place
        place += 1
        return batches[place % len(batches)]

    return take


def updated(model: Any, backward: Callable[[], None]) -> Callable[[], None]:
    """A step: all micro-batches, clipping, AdamW."""
    import torch
    from torch.distributed.tensor import DTensor

    kinds: dict[bool, list[Any]] = {}  # operations on lists take no mixture of tensors and DTensors
    for parameter in model.parameters():
        kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    groups = list(kinds.values())
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-4, weight_decay=0.1, fused=True)

    def norm_of(group: list[Any]) -> Any:
        norm = torch.nn.utils.get_total_norm([p.grad for p in group])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step() -> None:
        backward()
        norm = torch.stack([norm_of(group) for group in groups]).norm()
        for group in groups:
            torch.nn.utils.clip_grads_with_norm_(group, 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def data_parallel(model: Any, batches: Any) -> Callable[[], None]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    rank, size, take = dist.get_rank(), dist.get_world_size(), turns(batches)

    def backward() -> None:
        own = take()[rank::size]
        for number, sample in enumerate(own):
            wrapped.require_backward_grad_sync = number == len(own) - 1
            loss_of(wrapped(sample[None, :-1]), sample[None, 1:]).mul(size).backward()

    return updated(model, backward)


def fully_sharded(keeps_params: bool, reduces_each: bool) -> Callable[[Any, Any], Callable[[], None]]:
    """FSDP2, every layer wrapped. `keeps_params`: parameters are whole between the micro-batches of a step, else
    dropped after each pass (ZeRO-3). `reduces_each`: gradients are reduced with each micro-batch, else with the last
    one, whole until then."""

    def build(model: Any, batches: Any) -> Callable[[], None]:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=not keeps_params)
        fully_shard(model, mesh=mesh, reshard_after_forward=not keeps_params)
        rank, size, take = dist.get_rank(), dist.get_world_size(), turns(batches)

        def backward() -> None:
            own = take()[rank::size]
            for number, sample in enumerate(own):
                last = number == len(own) - 1
                model.set_requires_gradient_sync(last or reduces_each)
                model.set_reshard_after_backward(last or not keeps_params)
                loss_of(model(sample[None, :-1]), sample[None, 1:]).mul(size).backward()

        return updated(model, backward)

    return build


def tensor_parallel(model: Any, batches: Any) -> Callable[[], None]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        columns = {f"{part}": ColwiseParallel() for part in ("wq", "wk", "wv", "gate", "up")}
        parallelize_module(layer, mesh, {**columns, "wo": RowwiseParallel(), "down": RowwiseParallel()})
        layer.heads //= dist.get_world_size()
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    take = turns(batches)

    def backward() -> None:
        for sample in take():
            loss_of(model(sample[None, :-1]), sample[None, 1:]).backward()

    return updated(model, backward)


def pipelined(schedule: str, chunks: int) -> Callable[[Any, Any], Callable[[], None]]:
    """torch.distributed.pipelining with `chunks` stages a rank."""

    def build(model: Any, batches: Any) -> Callable[[], None]:
        import torch.distributed as dist
        from torch import nn
        from torch.distributed import pipelining
        from torch.distributed.pipelining import schedules

        rank, size, take = dist.get_rank(), dist.get_world_size(), turns(batches)
        count = size * chunks
        vee = schedule == "ScheduleZBVZeroBubble"
        own = [rank, count - 1 - rank] if vee else list(range(rank, count, size))
        parts = [model.stage(number, count) for number in own]
        stages = [pipelining.PipelineStage(part, number, count, "cpu") for part, number in zip(parts, own, strict=True)]
        kind = getattr(schedules, schedule)
        runs = kind(stages[0] if chunks == 1 else stages, MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)
        last = count - 1 in own

        def backward() -> None:
            batch = take()
            args = (batch[:, :-1].contiguous(),) if 0 in own else ()
            target = {"target": batch[:, 1:].contiguous()} if last else {}
            runs.step(*args, **target)

        return updated(nn.ModuleList(parts), backward)

    return build


STEPS: dict[str, Callable[[Any, Any], Callable[[], None]]] = {
    "torch DDP": data_parallel,
    "torch FSDP2": fully_sharded(keeps_params=True, reduces_each=False),
    "torch FSDP2 ZeRO-2": fully_sharded(keeps_params=True, reduces_each=True),
    "torch FSDP2 ZeRO-3": fully_sharded(keeps_params=False, reduces_each=True),
    "torch DTensor TP": tensor_parallel,
    "torch PP 1F1B": pipelined("Schedule1F1B", 1),
    "torch PP Interleaved1F1B": pipelined("ScheduleInterleaved1F1B", 2),
    "torch PP ZBV": pipelined("ScheduleZBVZeroBubble", 2),
}
RIVALS = {
    "ours TP": "torch DTensor TP",
    "ours TP+SP": "torch DTensor TP",
    "ours DP": "torch DDP",
    "ours ZeRO-1": "torch FSDP2",
    "ours ZeRO-2": "torch FSDP2 ZeRO-2",
    "ours ZeRO-3": "torch FSDP2 ZeRO-3",
    "ours PP 1f1b": "torch PP 1F1B",
    "ours PP interleaved": "torch PP Interleaved1F1B",
    "ours PP zb-h1": "torch PP ZBV",
    "ours PP zb-v": "torch PP ZBV",
}
ALONE = "one process"


def contestants(ranks: int, steps: int, only: Sequence[str]) -> Iterator[Contestant]:
    everyone = [
        *(Contestant(name, ours, (flags, steps), ranks=ranks) for name, flags in our_layouts(ranks).items()),
        Contestant("silent DP", silent, (ranks, steps), ranks=ranks),
        Contestant("silent TP", silent_tensor_parallel, (f"--tp {ranks}", steps), ranks=ranks),
        *(Contestant(name, torchs, (name, steps), ranks=ranks) for name in STEPS),
    ]
    yield from (contestant for contestant in everyone if not only or contestant.name in only)


def kind_of(name: str) -> str:
    """What a contestant is compared within."""
    return next((kind for kind in ("PP", "TP") if kind in name), "DP")


def by_kind(ranks: int, steps: int, only: Sequence[str]) -> Iterator[list[Contestant]]:
    """Those who take turns: one process, and all of a kind. More would not fit into the memory of a small machine."""
    kinds: dict[str, list[Contestant]] = {}
    for contestant in contestants(ranks, steps, only):
        kinds.setdefault(kind_of(contestant.name), []).append(contestant)
    for members in kinds.values():
        yield [Contestant(ALONE, ours, ("", steps), threads=min(ranks, os.cpu_count() or 1)), *members]


@dataclass(frozen=True)
class Row:
    contestant: str
    tokens_per_second: Spread | None
    failed: str | None
    of_one_process: float | None
    rival: str | None
    of_rival: float | None


def rows_of(found: dict[str, list[float] | str]) -> list[Row]:
    spreads = {name: Spread.of(values) for name, values in found.items() if not isinstance(values, str)}
    alone = spreads.get(ALONE)
    rows = []
    for name, values in found.items():
        spread, rival = spreads.get(name), spreads.get(RIVALS.get(name, ""))
        rows.append(
            Row(
                name,
                spread,
                values if isinstance(values, str) else None,
                spread.median / alone.median if spread and alone else None,
                RIVALS.get(name),
                spread.median / rival.median if spread and rival else None,
            )
        )
    return rows


def say(row: Row) -> None:
    """A line of the table."""
    if row.tokens_per_second is None:
        print(f"{row.contestant:<26} failed: {row.failed}")
        return
    against = "" if row.of_rival is None else f"{row.of_rival:.2f} x {row.rival}"
    alone = "" if row.of_one_process is None else f"{row.of_one_process:.2f}"
    print(f"{row.contestant:<26} {row.tokens_per_second:8,.0f} tokens/s  {alone:>6} x one process   {against}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_parser(__doc__, 5)
    parser.add_argument("--ranks", type=positive, default=2, help="processes of each contestant, of one thread each")
    parser.add_argument("--steps", type=positive, default=1, help="of a round")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these and one process, not all")
    args = parser.parse_args(argv)
    names = [contestant.name for contestant in contestants(args.ranks, args.steps, [])]
    if unknown := set(args.only) - set(names):
        parser.error(f"--only {' '.join(sorted(unknown))}: not one of {', '.join(names)}")
    facts = machine() | {"ranks": args.ranks}
    say_machine(facts)
    rows: list[Row] = []
    for members in by_kind(args.ranks, args.steps, args.only):
        found = rows_of(interleaved(members, args.rounds))
        for row in found:
            say(row)
        rows += found
    write_json(args.json, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
