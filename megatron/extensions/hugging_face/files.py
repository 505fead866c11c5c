"""Names of the files of a Hugging Face folder, and the reading of its JSON. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

CONFIG = "config.json"
SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object. Raises ValueError otherwise."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def is_model(path: str) -> bool:
    """Whether a folder is a Hugging Face model."""
    return os.path.isfile(os.path.join(path, CONFIG))
