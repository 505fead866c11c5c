"""Registry of console formats (--log-format). This module does not import torch."""

from __future__ import annotations

from typing import Protocol

from megatron.core.registry import NoFacts, Registry


class LogFormat(Protocol):
    """Class that formats console lines. The class is created with the arguments (config, train_iters), like
    `megatron.training.metrics.console.LogLines`."""

    def progress(self, record: dict[str, object]) -> str: ...


LOG_FORMATS = Registry("--log-format", NoFacts, protocol=LogFormat)
"""Values of --log-format, which are classes derived from `megatron.training.metrics.console.LogLines`:

    @LOG_FORMATS.register("terse")
    class Terse(LogLines):
        def progress(self, record): ...
"""

LOG_FORMATS.register("default", "megatron.training.metrics.console:LogLines")
