"""A template for an extension: copy this file, rename it, and keep what you need.

python pretrain_gpt.py --extension examples/template.py --activation-func my_activation --my-interval 10 ...
python -m megatron.testing.parity --extension examples/template.py -- --activation-func my_activation

The template defines flags, a validation rule for flags, an activation function, and a callback. docs/extending.md lists
everything that an extension can register.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from megatron.core.config import TransformerConfig
from megatron.core.config.activations import ACTIVATIONS
from megatron.core.config.flag_spec import flag
from megatron.core.tensor_parallel.layers import TPContext
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, Problem, extension_flags
from megatron.training.hooks import Callback
from megatron.training.run import TrainingRun

# 1. Flags. Each field defines a flag, and the string below the field is the flag's help text. `flag` states bounds,
#    choices and other flags that are required. By default, a resumed run must use the same values; add may_change=True
#    if they may differ.


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Yield violations of rules that bounds cannot express. A `Problem` names the flag, its value, the rule and a
    remedy."""
    options = config.options(MyFlags)
    if options.my_interval and config.training.train_iters and options.my_interval > config.training.train_iters:
        rule = f"is beyond the last iteration, --train-iters {config.training.train_iters}"
        yield Problem("--my-interval", options.my_interval, rule, "use a smaller interval")


@extension_flags("my extension", rules=rules)
@dataclass(frozen=True)
class MyFlags:
    my_slope: float = flag(0.1, at_least=0)
    """Slope of my_activation for negative values."""

    my_interval: int = flag(0, at_least=0)
    """Number of iterations between two log lines of the callback; 0 disables the callback."""


# 2. An activation function, which --activation-func selects. The function is built once for each layer, and reads its
# flags with `config.options`. Parameters are created with `make_parameter`, see examples/trainable_swish.py.


@ACTIVATIONS.register("my_activation")
class MyActivation:
    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        self.slope = config.options(MyFlags).my_slope

    def __call__(self, x: Tensor) -> Tensor:
        """x [s, b, f/tp] -> [s, b, f/tp]"""
        return F.leaky_relu(x, self.slope)


# 3. A callback. Every rank builds an instance if `when` returns True for the configuration.


@CALLBACKS.register("my callback", when=lambda config: config.options(MyFlags).my_interval > 0)
class MyCallback(Callback):
    def on_step_end(self, run: TrainingRun) -> None:
        if run.progress.iteration % self.config.options(MyFlags).my_interval == 0:
            run.say(f" my callback: {run.progress.consumed_samples} samples so far")
