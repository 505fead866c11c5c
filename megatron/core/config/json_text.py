"""Parses JSON that may come from anybody. This module does not import torch."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for any text without one, also where the parser of the standard
    library raises RecursionError, or speaks of settings of Python."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # the standard library refuses such numbers, which would take minutes to convert
        raise ValueError("it has a number of more than 4,300 digits") from None
