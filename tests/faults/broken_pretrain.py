"""Run `pretrain_gpt.py` with a fault. FAULT=kind:rank:step breaks the rank at the start of the step and writes the time
to FAULT_FILE. With FAULT_ONCE, the fault strikes only if this file does not exist. SLOW=PART slows down one part of the
work (see `slow_down`) on all ranks.

PACE adds a pause of this many seconds before each step. HOLD=data or HOLD=publish pauses rank 0 of the first start for
some seconds while it builds data or before it publishes a checkpoint, and then creates the file HELD. This program must
be started by a launcher such as torchrun."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch.utils.data import Subset

import pretrain_gpt
from megatron.core.dist_checkpointing import storage
from megatron.training import setup, training

HELD_SECONDS = 12


def exception(run: training.TrainingRun) -> None:
    raise RuntimeError("injected: this rank's own error")


def in_a_forward(run: training.TrainingRun) -> None:
    def hook(*_: object) -> None:
        raise RuntimeError("injected: this rank's own error")

    next(iter(run.stages.values())).register_forward_pre_hook(hook)


def out_of_memory(run: training.TrainingRun) -> None:
    raise torch.OutOfMemoryError("injected: no memory left")


def no_host_memory(run: training.TrainingRun) -> None:
    """Limit the address space, so that a large host memory allocation fails."""
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    torch.ones(1 << 40)


def exit_code_3(run: training.TrainingRun) -> None:
    os._exit(3)


def system_exit(run: training.TrainingRun) -> None:
    sys.exit(3)


def segfault(run: training.TrainingRun) -> None:
    ctypes.string_at(0)


def data_end(run: training.TrainingRun) -> None:
    """Make the dataset end after the samples consumed so far."""
    run.data.train.dataset = Subset(run.data.train.dataset, range(run.progress.consumed_samples))  # type: ignore


def not_a_number(run: training.TrainingRun) -> None:
    with torch.no_grad():
        next(next(iter(run.stages.values())).parameters()).fill_(math.nan)


def kill(run: training.TrainingRun) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(run: training.TrainingRun) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def other_collective(run: training.TrainingRun) -> None:
    dist.barrier()


def other_size(run: training.TrainingRun) -> None:
    """Call the collective that the other ranks call next, but with a tensor of a different size."""
    dist.all_reduce(torch.ones(7), group=run.runtime.state.tp.group)


def slow(run: training.TrainingRun) -> None:
    time.sleep(600)


def await_request(run: training.TrainingRun) -> None:
    while not run.runtime.watchdog.requests.pending:
        time.sleep(0.05)


def terminate(run: training.TrainingRun) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def user_signal(run: training.TrainingRun) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def slow_down(what: str) -> None:
    """Slow down one part of the work: building the data, a training step, or the end of a save. Print a line when this
    part begins."""

    def slowly(module: Any, name: str, line: str, seconds: float) -> None:
        quick = getattr(module, name)

        def slow(*args: Any, **values: Any) -> Any:
            print(line, flush=True)
            time.sleep(seconds)
            return quick(*args, **values)

        setattr(module, name, slow)

    match what:
        case "data":
            slowly(setup, "build_data", "building data", 60)
        case "step":
            slowly(training, "train_step", "in a long step", 60)
        case "publish":
            slowly(storage, "_publish", "publishing", 3)


def hold(what: str) -> None:
    module, name = {"data": (setup, "build_data"), "publish": (storage, "_publish")}[what]
    function, file = getattr(module, name), Path(os.environ["HELD"])

    def held(*args: Any, **values: Any) -> Any:
        if os.environ["RANK"] == "0" and not file.exists():
            file.touch()
            time.sleep(HELD_SECONDS)
        return function(*args, **values)

    setattr(module, name, held)


def main() -> int:
    kind, rank, step = os.environ.get("FAULT", "none:0:0").split(":")
    slow_down(os.environ.get("SLOW", ""))
    if what := os.environ.get("HOLD"):
        hold(what)
    pace = float(os.environ.get("PACE", "0"))
    fault, healthy, file = globals().get(kind), training.train_step, Path(os.environ.get("FAULT_FILE", ""))
    once = "FAULT_ONCE" in os.environ and file.exists()

    def train_step(run: training.TrainingRun, *args: Any) -> None:
        here = run.progress.iteration + 1 == int(step) and run.runtime.launch.rank == int(rank)
        if fault and here and not once:
            file.write_text(str(time.time()))
            fault(run)
        time.sleep(pace)
        healthy(run, *args)

    training.train_step = train_step
    return pretrain_gpt.main()


if __name__ == "__main__":
    sys.exit(main())
