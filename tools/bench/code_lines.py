"""Count the lines of code and the words in docs/. Blank lines, comments and docstrings are not counted as code.

python tools/bench/code_lines.py                     trunk, each extension, tools, research, tests, docs
python tools/bench/code_lines.py megatron/core/moe   folders
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Count the lines that contain code. A string that is a statement by itself counts as a docstring."""
    code, docstrings = set[int](), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code - docstrings)


def weigh(files: Iterable[Path]) -> tuple[int, int]:
    """Return the number of lines of code, and the number of modules. An `__init__.py` without code does not count as a
    module."""
    counts = [code_lines(path.read_text(encoding="utf-8")) for path in files if path.suffix == ".py"]
    return sum(counts), sum(count > 0 for count in counts)


def parts() -> Iterator[tuple[str, list[Path]]]:
    """Yield the name and the files of each part of the repository: extensions, the trunk (megatron/core and
    megatron/training), and folders such as tools/ and tests/."""
    library = sorted(Path("megatron").rglob("*.py"))
    extensions = Path("megatron/extensions")
    for folder in sorted(path.parent for path in extensions.glob("*/*/flags.py")):
        yield f"extension {folder.relative_to(extensions)}", [path for path in library if folder in path.parents]
    trunk = [Path("megatron/core"), Path("megatron/training")]
    yield "trunk", [path for path in library if any(folder in path.parents for folder in trunk)]
    for name in ("megatron", "tools", "research", "tests"):
        yield name, sorted(Path(name).rglob("*.py"))


def main(folders: list[str]) -> int:
    """Print the counts, and return the exit code, which is 2 if a folder has no Python file."""
    counted = [(folder, sorted(Path(folder).rglob("*.py"))) for folder in folders] if folders else list(parts())
    for name, files in counted:
        if not files:
            print(f"error: no Python file below {name}", file=sys.stderr)
            return 2
        lines, modules = weigh(files)
        print(f"{lines:7,} lines of code in {modules:3} modules: {name}")
    if not folders:
        pages = [*Path("docs").rglob("*.md"), *Path().glob("*.md")]
        print(
            f"{sum(len(page.read_text(encoding='utf-8').split()) for page in pages):7,} words in docs and other pages"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
