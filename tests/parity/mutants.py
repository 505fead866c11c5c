"""Mutation tests of the parity matrix. Each mutant is a deliberate bug in the library, which the matrix must report.

A mutant edits the source of library functions while one combination runs. The one-process reference is computed
beforehand with the unedited library. The files `mutants.txt`, here and in the folders of extensions, describe a mutant
by these lines:

    NAME: COMBINATION
      MODULE.FUNCTION
      - text that occurs once in the source of the function
      + text in its place, further lines with the same indentation

The combination must run the edited code. After the combination, ` with FLAGS` may add flags of features that are not
choices of the matrix. The leading `megatron.` of a module name is omitted.

    python -m tests.parity.mutants                  run every mutant with its combination; print one line per mutant
    python -m tests.parity.mutants 'Sinks' Rotary   run the mutants whose names begin with one of these words
    python -m tests.parity.mutants --matrix         run the matrix with every mutant until a combination fails
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from textwrap import dedent, indent
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from megatron.extensions import BUILT_IN
from tests.parity.matrix import compared, reference, whole_matrix
from tests.parity.matrix.combination import Combination

INSTALLED = {extension.name for extension in BUILT_IN}
OF_EXTENSIONS = (Path(__file__).parents[1] / "extensions" / name / "mutants.txt" for name in sorted(INSTALLED))
FILES = [Path(__file__).with_suffix(".txt"), *filter(Path.exists, OF_EXTENSIONS)]
STALE = ("TypeError", "AttributeError", "NameError", "ImportError")
"""Exception types that indicate a stale mutant, whose text no longer matches the source, rather than an error in the
library."""


class Mutant(NamedTuple):
    """Edits of library functions, with the combination and the additional flags that run the edited code."""

    edits: dict[str, list[tuple[str, str]]]
    combination: Combination
    flags: tuple[str, ...] = ()

    @property
    def is_there(self) -> bool:
        """True if all extensions that the mutant needs are available."""
        gone = [each for each in self.edits if each.startswith("extensions.") and each.split(".")[2] not in INSTALLED]
        return self.combination.is_there and not gone


def read(path: Path) -> Iterator[tuple[str, Mutant]]:
    """Read a file of mutants, and yield one tuple (name, mutant) per mutant."""
    name, mutant, edits = "", Mutant({}, Combination.of()), list[tuple[str, str]]()
    for line in path.read_text(encoding="utf-8").splitlines():
        mark, text = line[:4].strip(), line[4:]
        if not line.startswith(" "):
            if name:
                yield name, mutant
            name, _, choices = line.rpartition(": ")
            choices, _, flags = choices.partition(" with ")
            mutant = Mutant({}, Combination.read(choices), tuple(flags.split()))
        elif mark == "-":
            edits.append((text, ""))
        elif mark == "+":
            old, new = edits[-1]
            edits[-1] = old, f"{new}\n{text}" if new else text
        else:
            edits = mutant.edits.setdefault(line.strip(), [])
    yield name, mutant


MUTANTS = {name: each for path in FILES for name, each in read(path) if each.is_there}


def function_of(path: str) -> tuple[Any, FunctionType]:
    """Return the object at `MODULE.FUNCTION`, and the undecorated function."""
    found = resolve_name(f"megatron.{path}")
    return found, inspect.unwrap(found.fget if isinstance(found, property) else found)


def edited(function: FunctionType, edits: Sequence[tuple[str, str]]) -> CodeType:
    """Compile the edited source of a function, and return the code object, which has the same closure variables as the
    function."""
    source = dedent(inspect.getsource(function))
    for old, new in edits:
        before, found, behind = source.partition(old)
        assert found and old not in behind, f"{function.__qualname__} must have {old!r} once"
        line = before.rpartition("\n")[2]
        source = before + new.replace("\n", "\n" + line[: len(line) - len(line.lstrip())]) + behind
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list.clear()
    closure = f"def closure({', '.join(function.__code__.co_freevars)}):\n{indent(ast.unparse(definition), '    ')}"
    (outer,) = _codes(compile(closure, function.__code__.co_filename, "exec"))
    (code,) = _codes(outer)
    return code


def _codes(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Context manager that edits library functions as a mutant specifies, and restores them at the end of the block."""
    places = [(*function_of(path), edits) for path, edits in mutant.edits.items()]
    kept = [(found, function, function.__code__) for found, function, _ in places]
    try:
        for _, function, edits in places:
            function.__code__ = edited(function, edits)
        _forget_results(kept)
        yield
    finally:
        for _, function, code in kept:
            function.__code__ = code
        _forget_results(kept)


def _forget_results(places: Sequence[tuple[Any, ...]]) -> None:
    for found, *_ in places:
        if hasattr(found, "cache_clear"):
            found.cache_clear()


def seen(name: str, combination: Combination) -> str | None:
    """Run one combination of the parity matrix with a mutant, and return the difference that the matrix reports, or
    None if it reports no difference."""
    mutant = MUTANTS[name]
    reference(combination.alone, mutant.flags)
    with planted(mutant):
        try:
            return compared(combination, mutant.flags)[0]
        except (RuntimeError, TimeoutError) as error:
            said = str(error).strip().splitlines()[-1]
            if said.startswith(STALE):
                raise
            return f"{type(error).__name__}: {said[:160]}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="beginnings of names of mutants (default: all)")
    parser.add_argument("--matrix", action="store_true", help="look for the first red combination of the whole matrix")
    args = parser.parse_args(argv)
    chosen = {name: each for name, each in MUTANTS.items() if name.startswith((*args.names,) or "")}
    if not chosen:
        parser.error(f"no mutant has a name that begins with {' or '.join(args.names)}")
    survivors = []
    for name, mutant in chosen.items():
        for combination in whole_matrix() if args.matrix and not mutant.flags else [mutant.combination]:
            if said := seen(name, combination):
                print(f"{name} | {combination} | {said}", flush=True)
                break
        else:
            print(f"{name} | NOT NOTICED", flush=True)
            survivors.append(name)
    print(f"{len(chosen)} mutants, {len(survivors)} survived: {survivors or 'none'}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
