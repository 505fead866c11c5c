"""Evaluation task that measures, every N iterations, the fraction of validation tokens that the model predicts
correctly.

python pretrain_gpt.py --extension examples/token_accuracy.py --accuracy-interval 100 --eval-iters 10 ...

The task evaluates every validation set, including files passed with --valid. For example, --valid mine=data/mine.jsonl
adds the value `valid_mine_accuracy` to metrics.jsonl.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from megatron.core.collectives import all_reduce_
from megatron.core.config.flag_spec import flag
from megatron.core.tensor_parallel.cross_entropy import local_columns
from megatron.training.config.run_config import RunConfig
from megatron.training.evaluation import summed_loss, weights_to_evaluate
from megatron.training.extensions import CALLBACKS, Problem, extension_flags
from megatron.training.hooks import Callback, Log, Task
from megatron.training.run import TrainingRun


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    interval = config.options(AccuracyConfig).accuracy_interval
    if interval and not config.training.eval_iters:  # without --eval-iters, no validation data is loaded
        yield Problem("--accuracy-interval", interval, "needs --eval-iters above 0", "raise --eval-iters")


@extension_flags("token accuracy", may_change=True, rules=rules)
@dataclass(frozen=True)
class AccuracyConfig:
    accuracy_interval: int = flag(0, at_least=0)
    """Iterations between measurements of the token accuracy; 0: never."""


@CALLBACKS.register(
    "token accuracy",
    when=lambda config: config.options(AccuracyConfig).accuracy_interval > 0,
    evaluates="--accuracy-interval",
)
class TokenAccuracy(Callback):
    def tasks(self, run: TrainingRun, log: Log) -> Sequence[Task]:
        self.run, self.log = run, log
        interval = self.config.options(AccuracyConfig).accuracy_interval
        return (Task("token accuracy", interval, self.measure, at_end=True, evaluates=True),)

    def measure(self) -> None:
        """Measure the accuracy on the first --eval-iters batches of each validation set, and log it. All ranks must
        call this method."""
        run = self.run
        record: dict[str, object] = {"iteration": run.progress.iteration}
        with weights_to_evaluate(run):
            for name, iterator in run.data.evaluated("valid").items():
                steps = run.config.training.eval_iters
                found = summed_loss(run, iterator, 0, steps, "valid", name, metric=self.is_correct)
                if found is None:  # the run was asked to stop
                    return
                correct, tokens, _ = found
                record[f"valid_{name}_accuracy" if name else "valid_accuracy"] = correct / max(tokens, 1)
        self.log.write(record)

    def is_correct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits [s, b, V/tp], labels [s, b] -> [s, b]. The result is 1 where no token has a larger logit than the
        label, and 0 elsewhere."""
        tp = self.run.runtime.state.tp
        first, columns = local_columns(logits, self.run.config.model.vocab_size, tp)
        elsewhere = (labels < first) | (labels >= first + columns)
        index = (labels - first).masked_fill(elsewhere, 0)
        padding = torch.arange(logits.shape[-1], device=logits.device) >= columns
        of_label = logits.gather(-1, index[..., None]).squeeze(-1).masked_fill(elsewhere, -torch.inf)
        largest = logits.masked_fill(padding, -torch.inf).amax(-1)
        both = torch.stack([largest, of_label]).to(torch.promote_types(logits.dtype, torch.float32))
        largest, of_label = all_reduce_(both, tp, ReduceOp.MAX)
        return (of_label >= largest).float()
