"""Flags of Megatron-LM and Megatron-DeepSpeed for data lists. This module also registers the tables of those
Megatron-LM flags that have no configuration field in this program.

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
    """Megatron's flags for data lists. These flags are an alternative to --data-path and related flags."""

    data_args_path: str | None = flag(None, path="local")
    """File that contains the value of --data-path."""

    per_split_data_args_path: str | None = flag(None, path="local")
    """JSON file with the lists "train", "valid" and "test", the values of --train-data-path and related flags."""

    train_weighted_split_paths: tuple[str, ...] | None = flag(None, many=True, path="url")
    """Training data as "NAME: WEIGHT START:END PREFIX, ...", where START:END is a range of documents as fractions."""

    train_weighted_split_paths_path: str | None = flag(None, path="local")
    """File that contains the value of --train-weighted-split-paths."""

    valid_weighted_split_paths: tuple[str, ...] | None = flag(None, many=True, path="url")
    """Validation data, in the same form as --train-weighted-split-paths."""

    valid_weighted_split_paths_path: str | None = flag(None, path="local")
    """File that contains the value of --valid-weighted-split-paths."""

    test_weighted_split_paths: tuple[str, ...] | None = flag(None, many=True, path="url")
    """Test data, in the same form as --train-weighted-split-paths."""

    test_weighted_split_paths_path: str | None = flag(None, path="local")
    """File that contains the value of --test-weighted-split-paths."""

    @property
    def given(self) -> dict[str, tuple[str, ...] | str]:
        """Values of the flags that the user set, keyed by field name."""
        return {field: value for field, value in vars(self).items() if value}


FOREIGN_PROGRAMS.register("Megatron-LM", f"{__package__}.megatron:MEGATRON")
