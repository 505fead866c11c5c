"""Stop a run whose validation loss has not improved for --patience evaluations.

python pretrain_gpt.py --extension examples/early_stopping.py --patience 3 --eval-interval 100 ...
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags
from megatron.training.hooks import Callback, RunView


@extension_flags("early stopping", may_change=True)
@dataclass(frozen=True)
class EarlyStoppingConfig:
    patience: int = 3
    """Number of consecutive evaluations without a lower validation loss after which the run saves a checkpoint and
    ends."""


@CALLBACKS.register("early stopping")
class EarlyStopping(Callback):
    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.best, self.without = math.inf, 0

    def state(self) -> list[float]:
        return [self.best, self.without]

    def load_state(self, state: list[Any]) -> None:
        self.best, self.without = state

    def on_evaluation(self, run: RunView, split: str, record: Mapping[str, Any]) -> None:
        loss = record.get("valid_loss", math.inf)
        if split != "valid":
            return
        self.best, self.without = (loss, 0) if loss < self.best else (self.best, self.without + 1)
        if self.without == self.config.options(EarlyStoppingConfig).patience:
            run.stop(f"the validation loss has not fallen below {self.best:.4f} in {self.without} evaluations")
