"""Registers the zero-bubble schedules. This module does not import torch."""

from __future__ import annotations

from functools import partial

from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES, of_one_stage
from megatron.extensions.pipeline.zero_bubble.schedules import zb_h1, zb_h2, zb_v

PIPELINE_SCHEDULES.register("zb-h1", zb_h1, splits_backward=True, always_legal=True)
PIPELINE_SCHEDULES.register(
    "zb-h2", zb_h2, splits_backward=True, in_turns=of_one_stage(partial(zb_h2, in_turns=True)), always_legal=True
)
PIPELINE_SCHEDULES.register("zb-v", zb_v, chunks=2, v_shaped=True, splits_backward=True, always_legal=True)
