"""Extension for GPU runs (--extension). It makes a compiled region that exceeds its recompile limit raise an error. By
default, torch would silently run such a region without compilation."""

from __future__ import annotations

import torch._dynamo

torch._dynamo.config.fail_on_recompile_limit_hit = True
