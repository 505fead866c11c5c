"""Files that stop or save a run: `save` and `exit` in the folders of --save and --trigger-path, and a kill switch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from megatron.extensions.resilience.flags import StopFileFlags
from megatron.training.config.run_config import RunConfig
from megatron.training.reliability.rank_store import Request
from megatron.training.reliability.watchdog import Watch, Watchdog

TRIGGERS = {"save": "save", "exit": "stop"}
"""Name of a file -> kind of the request that it makes."""


class StopFiles(Watch):
    """Rank 0 looks for the files. The kill switch stops the run as long as it exists."""

    def __init__(self, config: RunConfig, watchdog: Watchdog) -> None:
        options, self._requests = config.options(StopFileFlags), watchdog.requests
        self._files = {folder / name: kind for folder in options.folders(config) for name, kind in TRIGGERS.items()}
        self._kill_switch = Path(options.kill_switch_path) if options.kill_switch_path else None
        self._stuck = set[Path]()
        """Files that could not be removed."""

    def look(self) -> None:
        if not self._requests.pending:
            for request in self.due():
                self._requests.ask(request)

    def due(self) -> Iterator[Request]:
        """The requests that are due now. The files `save` and `exit` are removed when they are seen."""
        if self._kill_switch is not None and self._kill_switch.exists():
            yield Request("stop", f"--kill-switch-path {self._kill_switch} exists")
        for path, kind in self._files.items():
            try:
                if path.is_file():
                    path.unlink()
                    yield Request(kind, f"{path} was there")
            except OSError as error:  # the watchdog's thread has to live on: it also listens to signals
                if path not in self._stuck:
                    print(f"{path} is ignored, as it cannot be removed: {error}", file=sys.stderr, flush=True)
                self._stuck.add(path)
