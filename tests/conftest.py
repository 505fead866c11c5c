"""Settings for all tests."""

import gc
import getpass
import importlib.util
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.registry import Registry
from megatron.extensions import load
from megatron.training import extensions
from megatron.training.config import flags
from tests.gloo_devices import share_gloo_devices
from tests.huge_pages import collapse_private_memory

# A shell makes background processes ignore SIGINT, and programs started by tests would inherit this setting.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

EXTENSIONS = Path(extensions.__file__).parents[1] / "extensions"

share_gloo_devices()
load()  # before a fixture can remove registered extensions

# torch looks up the name of each address that it connects to. If a name server drops requests, connections to a store
# would take ten seconds longer.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Tests start many programs that import large packages such as torch, so compiled bytecode is kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Libraries that torch compiled for wider vectors do not load if wide vector instructions are disabled.
vectors = torch.backends.cpu.get_cpu_capability().replace(" ", "-").lower()
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor-{getpass.getuser()}-{vectors}")
os.environ.setdefault("HF_DATASETS_CACHE", f"{tempfile.gettempdir()}/datasets-{getpass.getuser()}")

# hypothesis may be missing on a GPU machine, because no GPU test uses it.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    # Examples have no deadline, because their duration depends on the machine. Every run uses the same examples, so
    # that only a code change can cause a failure; --hypothesis-profile default draws other examples.
    slow = [HealthCheck.too_slow]
    settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=slow)
    settings.load_profile("repeatable")

LONGEST = (
    "tests/cli/test_docs.py",
    "tests/slurm/test_slurm.py",
    "tests/parity/test_matrix.py",
    "tests/parity/test_reshard.py",
    "tests/parity/test_overlap.py",
    "tests/parity/test_examples.py",
    "tests/faults/test_elastic.py",
    "tests/cli/test_gpu_bench.py",
    "tests/parity/test_context_parallel.py",
)
"""The slowest test files, which run first so that parallel workers finish at about the same time."""


CAMPAIGNS = tuple(Path(__file__).with_name("campaigns.txt").read_text().split())
"""Name prefixes of tests outside the core suite. These tests take long and run code that shorter tests also cover, run
whole programs, or simulate several hosts. These tests run only with --all, or if a path on the command line includes
them."""


def _left_out(config: pytest.Config, name: str) -> bool:
    whole_folder = {"tests", str(config.rootpath), str(config.rootpath / "tests")}
    core = not config.getoption("--all") and whole_folder.issuperset(config.args)
    return core and name.startswith(CAMPAIGNS)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    name = collection_path.relative_to(config.rootpath).as_posix()
    return _left_out(config, f"{name}/" if collection_path.is_dir() else name) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not _left_out(config, item.nodeid)]
    items.sort(key=lambda item: LONGEST.index(item.location[0]) if item.location[0] in LONGEST else len(LONGEST))


def pytest_report_header(config: pytest.Config) -> str | None:
    return "core suite: --all runs the campaigns too" if _left_out(config, CAMPAIGNS[0]) else None


class _Module(pytest.Module):
    """Test file that is skipped if it imports a deleted built-in extension."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            missing = re.search(r"No module named '(?:megatron\.extensions\.\w+|tests\.extensions)\.(\w+)", str(error))
            if missing is None or any(EXTENSIONS.glob(f"*/{missing[1]}/")):
                raise
            pytest.skip(f"{missing[1]} is deleted", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    found: pytest.Module = _Module.from_parent(parent, path=module_path)
    return found


def pytest_collection_finish() -> None:
    """Exempt all imported modules from garbage collection in this process and its forks, and keep them in huge pages
    that forks share."""
    gc.freeze()
    collapse_private_memory()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the campaigns too, which a path does that names them")
    parser.addoption("--whole", action="store_true", help="run whole grids of layouts where a part is the default")
    parser.addoption(
        "--nccl-on-one-gpu",
        nargs="?",
        const="cuda",
        choices=("cuda", "cpu"),
        help="tests of several ranks in tests/gpu run over NCCL, with all ranks on the first GPU; =cpu tries them with "
        "gloo on the CPU",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test marked `grid(name, part, whole)` for each value of `part`, or of `whole` with --whole. `whole` may be
    a function that returns the list of values, in case the list takes long to compute."""
    for mark in metafunc.definition.iter_markers("grid"):
        name, part, whole = mark.args
        if metafunc.config.getoption("--whole"):
            part = list(whole() if callable(whole) else whole)
        metafunc.parametrize(name, part, ids=str)


@pytest.fixture(autouse=True, scope="session")
def own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make training runs in tests record their extensions in a temporary folder."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True, scope="module")
def same_numbers_of_module() -> None:
    """Seed torch once per test file, so that random numbers in module-scoped fixtures do not depend on earlier
    files."""
    torch.manual_seed(1234)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Make the random numbers of a test independent of earlier tests."""
    torch.manual_seed(1234)


@pytest.fixture(autouse=True, scope="module")
def forget_extensions() -> Iterator[None]:
    """After each test file, remove the extensions that it registered, because tests in other files compare all
    registered flags and sections."""
    yield from _forgetting()


@pytest.fixture
def forget_extensions_at_once() -> Iterator[None]:
    """Apply `forget_extensions` after a single test."""
    yield from _forgetting()


def registry_tables() -> list[dict[str, Any]]:
    """Return one dictionary of entries per registry. Only registries in imported modules are found."""
    modules = [module for name, module in sys.modules.items() if name.startswith("megatron.")]
    found = [part for module in modules for part in vars(module).values() if isinstance(part, Registry)]
    return [part._entries for part in {id(part): part for part in found}.values()]


def _forgetting() -> Iterator[None]:
    load()
    tables = [*registry_tables(), flags.EXTENSION_SECTIONS, extensions._LOADED]
    before = {id(table): dict(table) for table in tables}
    yield
    library = str(Path(extensions.__file__).parents[1])
    for table in registry_tables():
        if id(table) not in before:  # for a registry in a newly imported module, keep only built-in entries
            before[id(table)] = {name: entry for name, entry in table.items() if entry.where.startswith(library)}
            tables.append(table)
    for table in tables:
        table.clear()
        table.update(before[id(table)])
    for cached in (flags.all_flags, flags.sections, flags.spelling_table, flags.field_table):
        cached.cache_clear()
