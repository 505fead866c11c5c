"""A JSON parser for untrusted text. This module does not import torch."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text. The function raises ValueError if the text is not valid JSON, nests too deeply, or contains a
    number with more than 4,300 digits. The standard library's parser raises RecursionError for deeply nested texts, and
    for long numbers it suggests changing a Python setting."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # the standard library refuses numbers that would take minutes to convert
        raise ValueError("it contains a number with more than 4,300 digits") from None
