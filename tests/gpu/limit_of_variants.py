"""`--extension` for runs on a GPU: a compiled region that exceeds its recompile limit raises an error. By default,
torch would silently run such a region without compilation."""

from __future__ import annotations

import torch._dynamo

torch._dynamo.config.fail_on_recompile_limit_hit = True
