"""Where the schedules are. No torch."""

from __future__ import annotations

from megatron.core.parts import PIPELINE_SCHEDULES

_SCHEDULES = f"{__package__}.schedules"
PIPELINE_SCHEDULES.register("zb-h1", f"{_SCHEDULES}:zb_h1", splits_backward=True, always_legal=True)
PIPELINE_SCHEDULES.register("zb-h2", f"{_SCHEDULES}:zb_h2", splits_backward=True, in_turns=True, always_legal=True)
PIPELINE_SCHEDULES.register(
    "zb-v", f"{_SCHEDULES}:zb_v", chunks=2, v_shaped=True, splits_backward=True, always_legal=True
)
