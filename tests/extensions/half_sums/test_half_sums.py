"""Test that --disable-bf16-reduced-precision-matmul makes cuBLAS add the partial sums of bf16 GEMMs in fp32."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megatron.training.config.arguments import parse_args
from megatron.training.hooks import Parts
from tests.tiny import TINY

FLAG = "--disable-bf16-reduced-precision-matmul"


@pytest.mark.parametrize("given", [True, False])
def test_the_flag_makes_partial_sums_fp32(given: bool) -> None:
    config = parse_args([*TINY.split(), *[FLAG] * given])
    callbacks = [each for each in Parts().with_registered(config).callbacks if each.name == "half sums"]
    assert len(callbacks) == given
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    try:
        matmul.allow_bf16_reduced_precision_reduction = True
        for callback in callbacks:
            callback.on_setup(mock.Mock())
        assert matmul.allow_bf16_reduced_precision_reduction == (not given)
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before
