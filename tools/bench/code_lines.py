"""Count the lines of code below a folder: no blank lines, comments or docstrings.

python tools/bench/code_lines.py megatron
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
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
    """Lines that hold code. A string that is a statement of its own counts as a docstring."""
    code, docstrings = set[int](), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code - docstrings)


def main(folders: list[str]) -> int:
    """Prints the count of each folder of Python files. Exit code 2 if one has none."""
    for folder in folders or ["megatron"]:
        files = sorted(Path(folder).rglob("*.py"))
        if not files:
            print(f"error: no Python file below {folder}", file=sys.stderr)
            return 2
        print(f"{sum(code_lines(path.read_text(encoding='utf-8')) for path in files):,} lines of code in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
