"""Tests of properties of the whole source tree that no test of a single module can check."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from megatron.extensions import load
from megatron.training.config.flags import all_flags, sections
from tests.apart import ROOT, python_apart
from tests.conftest import CAMPAIGNS

# Modules that work only on integers and text must run on a login node, where torch may be missing or slow to import.
WITHOUT_TORCH = {
    "megatron/core": "boxes config distributed.param_layout optimizer.param_scheduler "
    "optimizer.planned_states param_meta parallel_dims tokenizers",
    "megatron/core/pipeline_parallel": "actions layout passes schedules stages walk",
    "megatron/training": "config config.arguments config.validation reliability.launch",
    "megatron/extensions/interop/hugging_face": "family_files flags rules write_config",
    "megatron/extensions/interop/hugging_face/continued_training": "pretrained rotary_changes",
    "megatron/extensions/plan/planner": "commands flags",
    "megatron/testing": "parity parity_plan parity_rows",
}

BLOCK_TORCH = """
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ImportError("torch is blocked")

sys.meta_path.insert(0, Blocked())
failed = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(f"{name}: {error!r}")
sys.exit("\\n".join(failed) or 0)
"""


def test_planning_modules_import_without_torch() -> None:
    there = {folder: names.split() for folder, names in WITHOUT_TORCH.items() if (ROOT / folder).is_dir()}
    modules = [f"{folder.replace('/', '.')}.{name}" for folder, names in there.items() for name in names]
    python_apart("-c", BLOCK_TORCH, *modules, "pretrain_gpt", code=0)


def test_every_folder_of_the_library_is_a_package() -> None:
    """setup.py finds packages by their __init__.py files. A folder without this file would be missing from an
    installation."""
    folders = {path.parent for path in (ROOT / "megatron").rglob("*.py")}
    assert folders
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_pytest_enters_every_folder_of_tests(pytestconfig: pytest.Config) -> None:
    """By default, pytest skips folders with names such as `dist` and `build` (option norecursedirs)."""
    folders = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert "dist" in folders
    assert [f for f in folders for pattern in pytestconfig.getini("norecursedirs") if fnmatch(f, pattern)] == []


def test_ruff_checks_every_folder() -> None:
    """By default, ruff excludes all folders named `dist` and would therefore skip tests/dist."""
    shown = python_apart("-m", "ruff", "check", "--show-files", str(ROOT), code=0)
    looked_at = {Path(line) for line in shown.stdout.splitlines()}
    folders = ("megatron", "tools", "research", "tests", "examples")
    assert [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path not in looked_at] == []


def modules() -> dict[str, Path]:
    """Return the files of all library modules, keyed by the dotted name of the module. The names of packages do not end
    with `__init__`."""
    files = [path for path in (ROOT / "megatron").rglob("*.py") if path.name != "__init__.py"]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}


def layers() -> list[str]:
    """Return the modules and packages in the layers contract of pyproject.toml, from the top layer down."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contract = next(c for c in settings["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    return [name.strip() for layer in contract["layers"] for name in layer.split(":")]


def test_every_module_is_in_a_layer() -> None:
    named = layers()
    outside = [name for name in modules() if not any(name == layer or name.startswith(f"{layer}.") for layer in named)]
    assert outside == [], "add these modules to the layers of pyproject.toml"
    there = {name.rsplit(".", parts)[0] for name in modules() for parts in range(name.count("."))}
    assert [layer for layer in named if layer not in there] == [], "these layers contain no modules"


def test_modules_do_not_import_each_other_in_a_cycle() -> None:
    """Imports inside functions and under TYPE_CHECKING are also checked for cycles."""
    graph, known = grimp.build_graph("megatron", cache_dir=None), modules().keys()
    arrows = {name: graph.find_modules_directly_imported_by(name) & known for name in known}
    assert sum(map(len, arrows.values())) > len(arrows)
    TopologicalSorter(arrows).prepare()  # `prepare` raises CycleError if there is a cycle


def test_no_folder_of_the_library_has_too_many_modules() -> None:
    most = 16
    folders = {path.parent for path in modules().values()}
    sizes = {str(folder.relative_to(ROOT)): sum(p.parent == folder for p in modules().values()) for folder in folders}
    assert {folder: size for folder, size in sizes.items() if size > most} == {}


def test_campaigns_exist() -> None:
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")]
    for name in CAMPAIGNS:
        start, _, test = name.partition("[")[0].partition("::")
        found = [file for file in files if file.startswith(start)]
        assert found and all(f"def {test}" in (ROOT / file).read_text() for file in found if test), name


def trees(*folders: str) -> dict[Path, ast.Module]:
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path: ast.parse(path.read_text()) for path in files}


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of a module, its classes, functions, attributes and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yield all names that a module defines, imports or reads. Also yield its short strings, because these may be
    registered names."""
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield from re.findall(r"\w+", f"{node.name} {node.asname}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in texts:
            yield from re.findall(r"\w+", node.value)


def exists(name: str, packages: dict[str, ast.Module]) -> bool:
    """Return True if a dotted name is a module, or if all parts after its longest prefix that is a module are names in
    this module."""
    parts = re.split("[.:]", name)
    found = max((n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in packages), default=0)
    named = set(names_in(packages[".".join(parts[:found])])) if found else set()
    return found > 0 and named.issuperset(parts[found:])


DOTTED = re.compile(r"`(megatron(?:[.:]\w+)+)(?:\(.*?\))?`")
CAMEL = re.compile(r"`([A-Z][a-z]\w*[A-Z]\w*)(?:\.\w+)*(?:\(.*?\))?`")
"""Pattern for a class name in backticks, optionally followed by an attribute or a call. Names such as `MyOptimizer`
stand for a class that the reader writes."""


def missing(text: str, packages: dict[str, ast.Module], known: set[str]) -> list[str]:
    """Return the names in backticks in a text that do not exist."""
    dotted = [name for name in DOTTED.findall(text) if not exists(name, packages)]
    return dotted + [name for name in CAMEL.findall(text) if name not in known and not name.startswith("My")]


def test_names_cited_in_docstrings_exist() -> None:
    library = trees("megatron")
    known = {name for tree in (library | trees("tools")).values() for name in names_in(tree)}
    dotted = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in library}
    packages = {dotted[path].removesuffix(".__init__"): tree for path, tree in library.items()}
    texts = {dotted[path]: " ".join(docstrings(tree)) for path, tree in library.items()}
    wrong = {name: missing(text, packages, known) for name, text in texts.items()}
    assert {name: cited for name, cited in wrong.items() if cited} == {}
    planted = "`megatron.core.boxes.Gone`, `GoneAway(x)`, `megatron.gone`, `MyOwn`, `ParamMeta.name`"
    assert missing(planted, packages, known) == ["megatron.core.boxes.Gone", "megatron.gone", "GoneAway"]


def test_the_library_does_not_know_its_extensions() -> None:
    """Only entry points may load extensions. The import linter does not detect imports of modules by a string."""
    found = []
    for folder in ("core", "training"):
        for path in sorted((ROOT / "megatron" / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
            for node in ast.walk(tree):
                named = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts
                if named and "megatron.extensions" in node.value:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}")
    assert not found, "\n".join(found)


ABOUT_OTHER_EXTENSIONS = {"megatron/core/torch_private.py"}


def test_the_library_names_no_flag_of_an_extension() -> None:
    """Core and training code must not contain the names of extensions' flags. If the code depends on a property of such
    a flag, the flag's field must declare this property, as in `FlagSpec`."""
    load()
    own = {flag.field: flag for flag in all_flags() if sections()[flag.section].__module__.startswith("megatron.ext")}
    flags = {spelling for flag in own.values() for spelling in flag.shown}
    assert len(own) > 100
    found = []
    for folder in ("core", "training"):
        for path in sorted((ROOT / "megatron" / folder).rglob("*")):
            if path.suffix in (".toml", ".json", ".yaml"):
                found += [f"{path}: {name}" for name in own if re.search(rf"\b{name}\b", path.read_text())]
            if path.suffix != ".py":
                continue
            tree = ast.parse(path.read_text(encoding="utf-8"))
            texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
                    named = flags.intersection(re.findall(r"--[\w-]+", node.value)) | own.keys() & {node.value}
                    found += [f"{path.relative_to(ROOT)}:{node.lineno}: {name}" for name in sorted(named)]
    assert not found, "\n".join(found)


def test_only_tests_replace_attributes_with_mocks() -> None:
    """Library code must not use mocks to vary its behavior. If its behavior varies, for example with the device of a
    plan, an argument must determine it. Only `megatron.training.foreign` replaces functions of other libraries."""
    files = [path for folder in ("megatron", "tools", "research") for path in (ROOT / folder).rglob("*.py")]
    importing = re.compile(r"^\s*(from|import) (unittest|mock)\b", re.MULTILINE)
    assert len(files) > 400
    assert [path for path in files if importing.search(path.read_text())] == []


LIMITED = trees("megatron", "tools", "research")
"""Files to which the size limits apply."""

ARGUMENTS = 8

KEYWORDS_OF_LM_EVAL = "lm_eval_model.model: CheckpointLM.__init__"
"""Constructor whose many arguments are required by lm-eval, which passes the user's `--model_args` and the arguments of
its own classes by keyword."""

PAST_ARGUMENTS = {
    KEYWORDS_OF_LM_EVAL,
    # torch calls these autograd functions with positional arguments, and the backward pass must return one value per
    # argument.
    "core.tensor_parallel.layers: LinearFunction.forward",
    "extensions.speed.fusions.fused_norm: _FusedNorm.forward",
}
"""Functions that are exempt from the limit on the number of arguments. All other functions group their arguments, as in
`WeightSetup`. Do not add functions to this list."""


def named_functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield each function with its qualified name, which includes enclosing classes and functions."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        inside = f"{within}.{node.name}".lstrip(".") if named else within
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inside, node
        yield from named_functions(node, inside)


def arguments_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of arguments of a function, not counting `self` and `cls`."""
    given = function.args.posonlyargs + function.args.args
    return len(given) + len(function.args.kwonlyargs) - (bool(given) and given[0].arg in ("self", "cls"))


def test_functions_have_few_arguments() -> None:
    """Triton kernels may have more arguments, because all values must be passed to a kernel as arguments."""
    found = {
        f"{'.'.join(path.relative_to(ROOT).with_suffix('').parts).removeprefix('megatron.')}: {name}"
        for path, tree in LIMITED.items()
        for name, function in named_functions(tree)
        if arguments_of(function) > ARGUMENTS and not path.stem.endswith("_triton")
    }
    assert found - PAST_ARGUMENTS == set(), f"more than {ARGUMENTS} arguments: group those that belong together"
    assert PAST_ARGUMENTS - found == set(), "delete these functions from the exceptions"


def place(path: Path, node: ast.stmt | ast.expr) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def test_files_are_short() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in LIMITED}
    assert {name: number for name, number in lines.items() if number > 450} == {}, "split these files by subject"


def test_functions_are_short() -> None:
    """The number of lines includes signatures, docstrings and nested functions."""
    found = [
        f"{place(path, function)}: {name} has {lines} lines"
        for path, tree in LIMITED.items()
        for name, function in named_functions(tree)
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > 60
    ]
    assert not found, "\n".join(found)


def test_an_assignment_binds_at_most_two_targets() -> None:
    """An assignment that unpacks a single value may have more targets."""
    found = []
    for path, tree in LIMITED.items():
        for node in ast.walk(tree):
            packed = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
            if packed and isinstance(node.value, ast.Tuple) and len(node.targets[0].elts) > 2:
                found.append(place(path, node))
    assert not found, "\n".join(found)


COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def depth(tree: ast.AST) -> int:
    """Return the largest nesting depth of comprehensions in a tree."""
    within = max((depth(node) for node in ast.iter_child_nodes(tree)), default=0)
    return within + isinstance(tree, COMPREHENSIONS)


def test_comprehensions_are_not_nested_twice() -> None:
    """In addition, comprehensions must not have more than three `for` clauses."""
    found = []
    for path, tree in LIMITED.items():
        for node in ast.walk(tree):
            if isinstance(node, COMPREHENSIONS) and (depth(node) > 2 or len(node.generators) > 3):
                found.append(place(path, node))
    assert not found, "\n".join(found)
