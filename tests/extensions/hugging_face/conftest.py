from collections.abc import Iterator

import pytest

from tests.extensions.hugging_face import hf_exact


@pytest.fixture
def fp64() -> Iterator[None]:
    """Make torch compute in fp64 wherever code requests fp32, for the duration of the test."""
    with hf_exact.fp64():
        yield
