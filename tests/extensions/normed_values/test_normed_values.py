"""Models in which layers reuse the keys and values of earlier layers give the same results under parallel layouts as in
one process. The tests in tests/extensions/hugging_face compare logits and gradients with transformers."""

from __future__ import annotations

from megatron.testing.parity import main as parity

FLAGS = (
    "--attention-module normed_values --kv-shared-layers 2 --window-size 5 --window-attn-skip-freq 2 "
    "--num-query-groups 4 --position-embedding-type rope --num-layers 4"
)


def test_layouts_compute_the_same() -> None:
    rows = ["tp2-sp", "cp2-ring", "recompute-full"]
    assert parity(["--layouts", *rows, "--steps", "1", "--", *FLAGS.split()]) == 0
