"""`--extension` for runs on a GPU: a compiled region that exceeds its limit of variants is an error. torch would run it
uncompiled."""

from __future__ import annotations

import torch._dynamo

torch._dynamo.config.fail_on_recompile_limit_hit = True
