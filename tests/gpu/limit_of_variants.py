"""Extension for GPU runs (--extension) that raises an error if a compiled region exceeds its recompile limit. By
default, torch would silently run such a region without compilation."""

from __future__ import annotations

import torch._dynamo

torch._dynamo.config.fail_on_recompile_limit_hit = True
