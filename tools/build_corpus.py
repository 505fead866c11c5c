"""Build a text corpus from the Python source code on this machine: real text without a download.

    python tools/build_corpus.py --output corpus.jsonl

The tool writes JSON lines, {"text": ..., "path": ...}: one document for each source file of the standard library.
Installed packages, character tables and (without --with-tests) test folders are skipped. Files are ordered by a hash of
their paths, so that a validation split samples the whole library.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

if not __package__:  # When this file runs as a script, the repository is not in the module path.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "tools"

from megatron.core.fsync import whole_file

from .common import refuse_unwritable, run_tool, tool_parser

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "lib-dynload"})
TABLE_FOLDERS = frozenset({"encodings", "pydoc_data"})
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})


def source_files(root: Path, with_tests: bool) -> list[Path]:
    """Return the paths of all .py files under `root`, relative to `root` and sorted by a hash of the path."""
    skipped = SKIPPED_FOLDERS | TABLE_FOLDERS | (frozenset() if with_tests else TEST_FOLDERS)
    found = []
    for folder, children, names in os.walk(root):
        children[:] = [child for child in children if child not in skipped]
        found += [(Path(folder) / name).relative_to(root) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: hashlib.blake2b(path.as_posix().encode()).digest())


def documents(root: Path, with_tests: bool, min_chars: int) -> Iterator[dict[str, str]]:
    """Yield each text that is valid UTF-8 and has at least `min_chars` characters."""
    for path in source_files(root, with_tests):
        try:
            text = (root / path).read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if len(text) >= min_chars:
            yield {"text": text, "path": path.as_posix()}


def main(argv: list[str] | None = None) -> int:
    parser = tool_parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--source", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="folder to read")
    parser.add_argument("--with-tests", action="store_true", help="include test folders")
    parser.add_argument("--min-chars", type=int, default=200, help="skip files with fewer characters")
    parser.add_argument("--max-mb", type=float, default=float("inf"), help="stop after this many MB of text")
    args = parser.parse_args(argv)

    refuse_unwritable("--output", args.output)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    count = size = 0
    with whole_file(args.output) as file, open(file, "w", encoding="utf-8") as out:
        for document in documents(args.source, args.with_tests, args.min_chars):
            if size >= args.max_mb * 1e6:
                break
            out.write(json.dumps(document) + "\n")
            count += 1
            size += len(document["text"].encode())
        if not count:
            raise ValueError(f"--source {args.source}: contains no Python source; name a folder that does")
    print(f"{args.output}: {count} documents, {size / 1e6:.1f} MB of text from {args.source}")
    return 0


if __name__ == "__main__":
    run_tool(main)
