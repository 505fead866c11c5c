from collections.abc import Iterator

import pytest

from tests.extensions.hugging_face import hf_exact


@pytest.fixture
def fp64() -> Iterator[None]:
    """Compute in fp64 wherever a program asks for fp32."""
    with hf_exact.fp64():
        yield
