"""Run four training steps on one GPU with `python -m tests.gpu.watched_step FLAGS`. The first two steps compile regions
and choose kernels. In the last two steps, torch raises an error wherever the host would wait for the device."""

from __future__ import annotations

import sys

import torch

from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve, validate
from megatron.training.initialize import StartupPhases, initialize
from megatron.training.progress import Interval
from megatron.training.reliability.launch import Launch
from megatron.training.setup import build_run
from megatron.training.train_step import train_step


def main(argv: list[str]) -> None:
    config = resolve(parse_args(argv), 1)
    problems = validate(config, 1)
    assert not problems, problems
    run = build_run(config, initialize(config, Launch(0, 1, 0), StartupPhases()))
    interval = run.interval = Interval()
    for step in range(4):
        if step == 2:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        train_step(run)
    torch.cuda.set_sync_debug_mode("default")
    run.data.close()
    print("losses", torch.stack(interval.losses)[:, 0].tolist())


if __name__ == "__main__":
    main(sys.argv[1:])
