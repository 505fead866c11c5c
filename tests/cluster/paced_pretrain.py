"""`pretrain_gpt.py` at a pace, for faults of hosts: PACE seconds for each step. HOLD=data or HOLD=publish holds rank 0
of the first start for some seconds in building data or before it publishes a checkpoint, and creates the file HELD
then. Started by `tests.cluster.faults`, under a launcher."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import pretrain_gpt
from megatron.core.dist_checkpointing import storage
from megatron.training import setup, training

HELD_SECONDS = 12


def hold(module: Any, name: str) -> None:
    function, file = getattr(module, name), Path(os.environ["HELD"])

    def held(*args: Any, **values: Any) -> Any:
        if os.environ["RANK"] == "0" and not file.exists():
            file.touch()
            time.sleep(HELD_SECONDS)
        return function(*args, **values)

    setattr(module, name, held)


def main() -> int:
    match os.environ.get("HOLD"):
        case "data":
            hold(setup, "build_data")
        case "publish":
            hold(storage, "_publish")
    train_step, pace = training.train_step, float(os.environ.get("PACE", "0"))

    def paced(*args: Any) -> None:
        time.sleep(pace)
        train_step(*args)

    training.train_step = paced
    return pretrain_gpt.main()


if __name__ == "__main__":
    sys.exit(main())
