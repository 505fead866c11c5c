"""Tests of differential attention: head widths, and the parity of parallel layouts with one process. The tests in
tests/extensions/hugging_face compare logits and gradients with transformers."""

from __future__ import annotations

from megatron.testing.parity import main as parity
from tests.gpt_cases import model_of

FLAGS = "--attention-module differential_attention --position-embedding-type rope --num-query-groups 4"


def test_layouts_compute_the_same() -> None:
    rows = ["tp2-sp", "cp2-ring"]
    assert parity(["--layouts", *rows, "--steps", "1", "--", *FLAGS.split(), "--num-layers", "2"]) == 0


def test_value_widths_match_both_heads() -> None:
    """Memory plans and kernels use the head widths that `head_widths` returns. The value width of a differential
    attention head is twice its key width."""
    widths = model_of("differential").head_widths
    assert (widths.key, widths.value) == (4, 8)
