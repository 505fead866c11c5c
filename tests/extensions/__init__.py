"""Tests of the built-in extensions. Each folder is named after the extension that it tests."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.extensions import BUILT_IN


def installed(extension: str | None) -> bool:
    """Return True if the built-in extension `extension` is installed, or if `extension` is None."""
    return extension is None or any(built_in.name == extension for built_in in BUILT_IN)


def needs(extension: str, *values: Any) -> Any:
    """Return pytest parameters that are skipped if a built-in extension is not installed."""
    return pytest.param(*values, marks=pytest.mark.skipif(not installed(extension), reason=f"{extension} is deleted"))
