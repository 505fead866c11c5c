"""Every pipeline schedule against one process: stages, chunks and micro-batches in any numbers, embeddings tied or not.

Seven layers, so that nothing divides; dropout is on. Micro-batches: 6 samples in micro-batches of 1, 2, 3 or 6 give
m = 6, 3, 2, 1, more than the pipeline has ranks and fewer, even and odd.
"""

from __future__ import annotations

from functools import lru_cache

import pytest

from megatron.testing.snapshot import first_difference
from tests.harness import Snapshot, train_in_world

COMMON = (
    "--num-layers 7 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 50 "
    "--make-vocab-size-divisible-by 4 --lr 1e-2 --weight-decay 0.1 --mock-data --global-batch-size 6 "
    "--train-iters 2 --eval-iters 0 --num-workers 0 --fp64 --cpu"
)
STYLES = {
    "tied": COMMON,
    "untied": COMMON
    + " --untie-embeddings-and-output-weights --position-embedding-type rope --normalization RMSNorm --swiglu"
    " --disable-bias-linear --group-query-attention --num-query-groups 2 --attention-dropout 0",
}
# With tied embeddings the ends of the pipeline matter, so these run with all.
LAYOUTS = [
    (2, "--pp 2 --pipeline-schedule gpipe --micro-batch-size 2"),
    (4, "--pp 4 --micro-batch-size 2"),
    (2, "--pp 2 --micro-batch-size 6"),
    (2, "--pp 2 --pipeline-schedule interleaved"),
    (2, "--pp 2 --num-virtual-stages-per-pipeline-rank 3 --micro-batch-size 2"),
    (2, "--pp 2 --num-layers-per-virtual-pipeline-stage 1 --micro-batch-size 6"),
    (3, "--pp 3 --num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 3"),
    (4, "--pp 4 --num-layers-per-virtual-pipeline-stage 1 --micro-batch-size 2"),
    (
        4,
        "--pp 4 --pipeline-schedule interleaved --decoder-first-pipeline-num-layers 3"
        " --decoder-last-pipeline-num-layers 0",
    ),
    (1, "--num-virtual-stages-per-pipeline-rank 3 --micro-batch-size 2"),
    (4, "--pp 4 --pipeline-model-parallel-layout Et*4|t*3||L --micro-batch-size 2"),
    (2, "--pp 2 --pipeline-model-parallel-layout E||(tt|)*3t||L --micro-batch-size 2"),
    (2, "--pp 2 --pipeline-schedule zb-v --pipeline-model-parallel-layout Et*3||t|t*3L"),
    (6, "--dp 2 --pp 3 --pipeline-model-parallel-layout Et*7||L --overlap-grad-reduce --overlap-param-gather"),
    (2, "--pp 2 --pipeline-schedule interleaved --microbatch-group-size-per-virtual-pipeline-stage 4"),
    (2, "--pp 2 --pipeline-schedule zb-h1 --micro-batch-size 2"),
    (4, "--pp 4 --pipeline-schedule zb-h1 --account-for-loss-in-pipeline-split"),
    (2, "--pp 2 --pipeline-schedule zb-h2"),
    (4, "--pp 4 --pipeline-schedule zb-h2 --micro-batch-size 2"),
    (1, "--pipeline-schedule zb-v --micro-batch-size 2"),
    (2, "--pp 2 --pipeline-schedule zb-v"),
    (2, "--pp 2 --pipeline-schedule zb-v --micro-batch-size 6 --decoder-last-pipeline-num-layers 3"),
    (4, "--pp 4 --pipeline-schedule zb-v --micro-batch-size 2"),
    (4, "--tp 2 --sequence-parallel --pp 2 --pipeline-schedule interleaved --micro-batch-size 2"),
    (4, "--tp 2 --sequence-parallel --pp 2 --pipeline-schedule zb-h1 --micro-batch-size 3"),
    (4, "--tp 2 --sequence-parallel --pp 2 --pipeline-schedule zb-v --micro-batch-size 2"),
    (4, "--dp 2 --pp 2 --pipeline-schedule zb-v --no-use-distributed-optimizer"),
    (4, "--dp 2 --pp 2 --pipeline-schedule interleaved --use-tp-pp-dp-mapping"),
]
UNTIED = [layout for layout in LAYOUTS if "zb-" in layout[1] or "interleaved" in layout[1]][::2]


@lru_cache
def one_process(style: str) -> Snapshot:
    return train_in_world(1, STYLES[style].split())


@pytest.mark.parametrize(
    ("style", "world_size", "layout"),
    [("tied", *layout) for layout in LAYOUTS] + [("untied", *layout) for layout in UNTIED],
    ids=lambda value: str(value).replace("--", ""),
)
def test_layout_computes_what_one_process_does(style: str, world_size: int, layout: str) -> None:
    snapshot = train_in_world(world_size, [*STYLES[style].split(), *layout.split()])
    assert not snapshot.replica_errors
    assert first_difference(one_process(style), snapshot, tolerance=1e-9) is None
