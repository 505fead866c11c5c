"""Test that each private name of torch that this library uses exists, and that only one module uses private names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from megatron.core import torch_private
from tests.apart import ROOT

PRIVATE = ROOT / "megatron/core/torch_private.py"

EXPLAINED = {
    # This file replaces parts of torch's compiler to generate GPU code without a GPU. The file is a command, and only
    # tests import it.
    "tools/bench/fake_cuda.py",
}
"""Files that may use private names of torch. The comment before each file states the reason."""

OTHERS = {"_asdict", "_exit", "_fields", "_make", "_replace", "_current_frames", "_getframe"}
"""Names with a leading underscore in Python's named tuples, `os` and `sys`."""

PACKAGE_OF_FLASH_ATTENTION_3 = {"_flash_attn_forward", "_flash_attn_backward"}
"""Names that belong to the flash-attention package rather than to torch."""

PARTS = {"inductor", "PyTorchFileReader", "_internal"}
"""Names of torch that count as private although they have no leading underscore or belong to a public package."""


def is_private(name: str) -> bool:
    return name in PARTS or (name.startswith("_") and not name.startswith("__"))


def files() -> list[Path]:
    folders = [
        path for folder in ("megatron", "tools", "research", "examples") for path in (ROOT / folder).rglob("*.py")
    ]
    return [ROOT / "pretrain_gpt.py", *folders]


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names of functions, classes, variables and attributes of `self` that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and root(node) == "self":
            yield node.attr


def root(node: ast.expr) -> str:
    """Return the name at the start of a chain of attributes, calls and subscripts, or "" if the chain does not start
    with a name."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def uses(tree: ast.AST, ours: set[str], known: set[str]) -> Iterator[str]:
    """Yield the private torch names that a module uses. A private name counts if it is imported from torch, follows a
    name imported from torch, is in `known`, or is not defined anywhere in the tree."""
    of_torch = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names if alias.name.partition(".")[0] == "torch"]
            of_torch |= {alias.asname for alias in node.names if alias.name in paths and alias.asname}
            yield from (path for path in paths if any(map(is_private, path.split("."))))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            of_torch |= {alias.asname or alias.name for alias in node.names}
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (path for path in paths if any(map(is_private, path.split("."))))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            begins = root(node)
            inherited = begins in ("self", "cls", "super") and node.attr in ours
            if begins in of_torch or ((node.attr not in ours | OTHERS or node.attr in known) and not inherited):
                yield ast.unparse(node)


def found_in(trees: dict[Path, ast.AST], known: set[str]) -> dict[str, list[str]]:
    ours = {name for tree in trees.values() for name in defined(tree)} | PACKAGE_OF_FLASH_ATTENTION_3
    found = {path.relative_to(ROOT).as_posix(): sorted(uses(tree, ours, known)) for path, tree in trees.items()}
    return {path: names for path, names in found.items() if names}


def known_names() -> set[str]:
    """Return the private names of torch that `megatron.core.torch_private` uses."""
    attributes = (node.attr for node in ast.walk(ast.parse(PRIVATE.read_text())) if isinstance(node, ast.Attribute))
    return {name for name in attributes if is_private(name)}


def test_one_module_uses_private_names_of_torch() -> None:
    trees: dict[Path, ast.AST] = {path: ast.parse(path.read_text()) for path in files()}
    found = found_in(trees, known_names())
    assert len(found.pop("megatron/core/torch_private.py")) > 40
    assert {path for path in EXPLAINED if not found.pop(path, None)} == set(), (
        "these names no longer need an explanation"
    )
    assert found == {}, "give these names a function or an alias in megatron/core/torch_private.py"


def test_every_kind_of_use_is_detected() -> None:
    source = """
import torch._dynamo
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.distributed_c10d import _set_pg_timeout
class Ours:
    def _own(self): return self._own()
def use(x, y): return torch._foreach_add_(x, y), dist._x, x.untyped_storage()._cdata, x._unknown, y._own, y._replace()
torch.ops.inductor.resize_storage_bytes_(x, 0)
"""
    found = found_in({ROOT / "x.py": ast.parse(source)}, {"_cdata"})["x.py"]
    kinds = "FakeTensor _cdata _dynamo _foreach_add_ _set_pg_timeout _unknown _x inductor"
    assert sorted(name.rpartition(".")[2] for name in found) == kinds.split()


def test_every_private_name_states_its_purpose() -> None:
    body = ast.parse(PRIVATE.read_text()).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef):
            text = ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
        else:
            continue
        assert "torch 2." in " ".join(text.split()), ast.unparse(node)


def test_private_names_behave_as_described() -> None:
    """Functions look up torch's names when they are called, but aliases are bound to torch's objects when the module is
    imported."""
    x = torch.ones(2, 3)
    view = x[1:]
    assert (
        torch_private.storage_id(x) == torch_private.storage_id(view) == torch_private.storage_id(x.untyped_storage())
    )
    assert torch_private.storage_id(x) != torch_private.storage_id(x.clone())
    before = torch_private.version_of(x)
    view.add_(1)
    assert torch_private.version_of(x) == before + 1
    assert torch_private.is_view(view) and not torch_private.is_view(x)

    module = nn.Linear(2, 2)
    assert not torch_private.is_hooked(module)
    module.register_forward_hook(print)
    assert list(torch_private.forward_hooks(module)) == [print]
    assert torch_private.is_hooked(module) and not torch_private.is_hooked(module, forward=False)
    module.register_full_backward_hook(print)
    assert torch_private.is_hooked(module, forward=False)

    y = torch.ones(2, requires_grad=True) * 2
    z = y + 1
    assert torch_private.sequence_number(y.grad_fn) < torch_private.sequence_number(z.grad_fn)
    assert torch_private.sequence_number(z.grad_fn) < torch_private.next_sequence_number()
    assert torch_private.running_node() is None
    called: list[str] = []
    y.register_hook(lambda grad: torch_private.call_after_backward(lambda: called.append("end")))
    y.register_hook(lambda grad: called.append(torch_private.running_node().name()))
    z.sum().backward()
    assert len(called) == 2 and called[0].endswith("Backward0") and called[1] == "end"

    info = torch_private.storage_info("a.distcp", 8, 16)
    assert (info.relative_path, info.offset, info.length) == ("a.distcp", 8, 16)
    assert torch_private.profiler_options(all_threads=True) is not None
    assert all(isinstance(text, str | bytes) for text in torch_private.flight_records())
    assert torch_private.fake_store() is not None and torch_private.fake_work().wait()
    assert isinstance(torch_private.matmul_instructions(torch.bfloat16), bool)
    assert isinstance(torch_private.matmul_instructions(torch.float16), bool)
    assert torch_private.schema_of(torch.ops.aten.add_.Tensor).arguments[0].alias_info.is_write
    torch_private.load_symmetric_memory()
    torch_private.preload_compiler()


def test_tensor_memory_can_be_freed_and_allocated_again() -> None:
    x = torch.ones(8)
    torch_private.resize_storage(x, 0)
    assert x.untyped_storage().nbytes() == 0
    torch_private.resize_storage(x, 32)
    assert x.untyped_storage().nbytes() == 32
