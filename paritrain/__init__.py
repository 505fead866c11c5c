"""Top-level package of the distribution, which makes the library `megatron` importable.

`pip install` puts the library into `paritrain/_src`, so that it does not replace files of another distribution that is
imported as `megatron`, such as megatron-core. Importing `paritrain` puts the folder with the library first on the path.
A program that uses the library therefore begins with `import paritrain`. In a clone of the repository, the library is
in the parent folder of `paritrain`.
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["SOURCE", "__version__"]


def _source() -> Path:
    here = Path(__file__).resolve().parent
    installed = here / "_src"
    return installed if installed.is_dir() else here.parent


SOURCE = _source()
"""Folder that contains `megatron`, `pretrain_gpt.py` and the tools."""


def _put_first(folder: Path) -> None:
    """Put a folder first on `sys.path`. Raises ImportError if this process has imported another `megatron`."""
    sys.path[:] = [str(folder), *(entry for entry in sys.path if entry != str(folder))]
    loaded = sys.modules.get("megatron")
    if loaded is not None and str(folder / "megatron") not in map(str, loaded.__path__):
        raise ImportError(
            f"paritrain needs its own package megatron, but this process has imported the one in {[*loaded.__path__]}: "
            "import paritrain first, or use the other one in a process of its own"
        )


_put_first(SOURCE)

from megatron import __version__  # noqa: E402
