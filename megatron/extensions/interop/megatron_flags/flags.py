"""Flags of Megatron-LM and Megatron-DeepSpeed: lists of data, and where the tables of those without a field are.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.training.config.reading import FOREIGN_PROGRAMS
from megatron.training.extensions import extension_flags


@extension_flags("lists of data", may_change=True, reads=f"{__package__}.data_lists:with_data_lists", part_of="data")
@dataclass(frozen=True)
class DataLists:
    """Data in other words than those of --data-path and related flags."""

    data_args_path: str | None = flag(None, path="local")
    """File with the words of --data-path."""

    per_split_data_args_path: str | None = flag(None, path="local")
    """JSON file with lists "train", "valid" and "test" of the words of --train-data-path and related flags."""

    train_weighted_split_paths: tuple[str, ...] | None = flag(None, many=True, path="url")
    """Training data as "NAME: WEIGHT START:END PREFIX, ...", where START:END is a share of the documents."""

    train_weighted_split_paths_path: str | None = flag(None, path="local")
    """File with the value of --train-weighted-split-paths."""

    valid_weighted_split_paths: tuple[str, ...] | None = flag(None, many=True, path="url")
    """Like --train-weighted-split-paths, for validation."""

    valid_weighted_split_paths_path: str | None = flag(None, path="local")
    """File with the value of --valid-weighted-split-paths."""

    test_weighted_split_paths: tuple[str, ...] | None = flag(None, many=True, path="url")
    """Like --train-weighted-split-paths, for the test set."""

    test_weighted_split_paths_path: str | None = flag(None, path="local")
    """File with the value of --test-weighted-split-paths."""

    @property
    def given(self) -> dict[str, tuple[str, ...] | str]:
        """Field -> value of those that are given."""
        return {field: value for field, value in vars(self).items() if value}


FOREIGN_PROGRAMS.register("Megatron-LM", f"{__package__}.megatron:MEGATRON")
