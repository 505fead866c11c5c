"""Rules of overlapped communication. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.extensions.overlap.flags import OverlapFlags
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def overlap(c: RunConfig, world_size: int) -> Iterator[Problem]:
    p, method = c.parallel, c.options(OverlapFlags).tp_comm_overlap_method
    if method == "symmetric" and (p.cpu or p.distributed_backend == "gloo"):
        rule = "needs GPUs and nccl, but --cpu or gloo is given"
        yield Problem("--tp-comm-overlap-method", method, rule, "use ring, which runs on any device")
