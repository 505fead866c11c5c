"""Models with per-layer embeddings give the same results under parallel layouts as in one process. The tests in
tests/extensions/hugging_face compare logits and gradients with transformers."""

from __future__ import annotations

from megatron.testing.parity import main as parity

FLAGS = "--per-layer-embedding-size 8 --swiglu --norm-placement sandwich --position-embedding-type rope --num-layers 2"


def test_layouts_compute_the_same() -> None:
    """All layers share one norm weight, which belongs to the first pipeline stage."""
    rows = ["tp2", "tp2-sp", "pp2-1f1b"]
    assert parity(["--layouts", *rows, "--steps", "1", "--", *FLAGS.split()]) == 0
