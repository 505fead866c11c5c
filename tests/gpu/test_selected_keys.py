"""Tests that compare GPU kernels for attention to selected keys with plain torch in fp32. The tests also cover the
order in which the kernels add terms."""

from __future__ import annotations

import pytest

from tests.gpu.apart import assert_agrees

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")

KERNELS = """
from tests.extensions.sparse_attention.test_selected_kernels import check_on_gpu
check_on_gpu()
print("agree")
"""


def test_kernels_match_plain_torch_and_sums_are_reproducible() -> None:
    assert_agrees(KERNELS)
