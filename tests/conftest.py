"""Settings of all tests."""

import pytest
from hypothesis import settings

# How long an example takes says something about the machine, not about the code.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run whole grids of layouts where a part is the default")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test marked `grid(name, part, whole)` runs for each value of `part`, or of `whole` under --whole."""
    for mark in metafunc.definition.iter_markers("grid"):
        name, part, whole = mark.args
        metafunc.parametrize(name, whole if metafunc.config.getoption("--whole") else part, ids=str)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under pytest-xdist one worker runs all tests of a file, as they share fixtures, and one all those on the GPU."""
    for item in items:
        folder = item.path.parent.name
        item.add_marker(pytest.mark.xdist_group("gpu" if folder == "gpu" else f"{folder}/{item.path.stem}"))
