"""Where the tables of Megatron's flags, and of differences from its results, are. No flags of its own and no torch."""

from __future__ import annotations

from megatron.training.config.foreign_flags import DIFFERENCES, FLAG_TABLES

FLAG_TABLES.register("Megatron-LM", f"{__package__}.megatron_flags:read_tables")
DIFFERENCES.register("Megatron-LM", f"{__package__}.megatron_differences:differences_met")
