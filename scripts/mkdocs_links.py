"""MkDocs hook for links to files outside docs/. Each such link is replaced with the path of the file in the
repository."""

from __future__ import annotations

import re
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Rewrite links: [executor.py](../megatron/.../executor.py) -> executor.py (`megatron/.../executor.py`)."""
    return LINK.sub(r"\1 (`\2`)", markdown)
