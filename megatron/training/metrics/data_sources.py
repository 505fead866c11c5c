"""Indices, names and token counts of a run's data sources."""

from __future__ import annotations

import re
from pathlib import Path

from megatron.core.config.data import DatasetConfig
from megatron.core.datasets.build import parse_blend


class SourceNames:
    """Indices and names of the data sources of a run. A path is a single source, even if several phases or splits use
    it."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.names: list[str] = []
        self.tokens: dict[int, int] = {}
        """Number of tokens in one epoch of each training source, keyed by the index of the source."""

    def numbers(self, config: DatasetConfig, split: str) -> list[int]:
        """Return the indices of the data sources that a split blends, in the order of the blend. A new source gets the
        next index."""
        values = getattr(config, f"{split}_data_path") if config.per_split else config.data_path
        paths = parse_blend("--data-path", values).prefixes if values and config.dataset == "gpt" else [config.dataset]
        return [self._number(path) for path in paths]

    def sized(self) -> tuple[list[str], list[int]]:
        """Return two lists for all sources: names, and numbers of tokens per epoch. Both lists are empty if the data
        have no epochs. A source that is not used for training counts as one token."""
        if not self.tokens:
            return [], []
        return self.names, [self.tokens.get(number, 1) or 1 for number in range(len(self.names))]

    def _number(self, path: str) -> int:
        if path not in self.paths:
            name = re.sub(r"[^\w.-]+", "-", Path(path.rstrip("/")).name)
            others = sum(each == name or each.startswith(f"{name}-") for each in self.names)
            self.paths.append(path)
            self.names.append(f"{name}-{others + 1}" if others else name)
        return self.paths.index(path)
