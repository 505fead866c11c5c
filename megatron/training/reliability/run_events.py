"""What happened to a run: starts, saves, and ends with their reason, in `run_events.jsonl` of --save. No torch.

One JSON object a line, with `time` (seconds since 1970) and `event`:

    start   iteration that it starts from, world_size
    save    iteration, and seconds from its start until it was on disk; or the error of an attempt
    end     name of `ExitCode`, and the reason in one line

Lines are only added, by whichever rank reports, so the file also tells of the starts that a resumed run has behind it.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.path_kind import EVENTS


def record_event(save: str | Path | None, event: str, **facts: Any) -> None:
    """Adds a line. Without --save, before its folder is there, and on a full disk it does nothing."""
    if not save or not Path(save).is_dir():
        return
    line = json.dumps({"time": round(time.time(), 3), "event": event, **facts})
    with suppress(OSError), (Path(save) / EVENTS).open("a", encoding="utf-8") as file:
        file.write(line + "\n")
