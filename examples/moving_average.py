"""Token mixer that computes an exponential moving average of each channel and multiplies the average by a gate. The
decay of each channel is trainable.

python pretrain_gpt.py --extension examples/moving_average.py --hybrid-layer-pattern A-*-A- ...
python pretrain_gpt.py --extension examples/moving_average.py --experimental-attention-variant moving_average ...

A moving-average layer needs the whole sequence, but under context parallelism a rank holds only a part of each
sequence. The mixer therefore refuses context parallelism (`whole_sequences`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.batch import BatchContext
from megatron.core.config import TransformerConfig
from megatron.core.config.mixers import MIXERS
from megatron.core.param_meta import Init
from megatron.core.tensor_parallel.layers import TPContext, column_parallel, make_sharded_parameter, row_parallel
from megatron.core.tensor_parallel.linear_spec import ColumnLinear, RowLinear


@MIXERS.register("moving_average", letter="A")
class MovingAverage(nn.Module):
    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        h = config.hidden_size
        self.layer = ctx.layer
        # Each tensor-parallel rank holds some channels. The value and the gate of a channel are adjacent rows.
        self.in_proj = column_parallel(ColumnLinear(f"{name}.in_proj", h, (h, 2), False), ctx)
        decays = Init("uniform", low=0.0, high=4.0)
        self.decay = make_sharded_parameter(f"{name}.decay", (h,), ctx, role="vector", init=decays)
        self.out_proj = row_parallel(RowLinear(f"{name}.out_proj", h, h, False), ctx)

    def forward(self, x: Tensor, context: BatchContext) -> Tensor:
        value, gate = self.in_proj(x).unflatten(-1, (-1, 2)).unbind(-1)  # [s, b, h/tp]
        decay, cache = self.decay.sigmoid(), context.cache
        begins = torch.zeros(*value.shape[:2], 1, dtype=torch.bool, device=x.device)
        for sample, places in enumerate(context.documents or ()):
            begins[list(places), sample] = True  # the average restarts at each document
        state = (cache.states(self.layer) if cache is not None else None) or (torch.zeros_like(value[0]),)
        averages = [state[0]]
        for t, new in enumerate(value):
            before = averages[-1].masked_fill(begins[t], 0.0)
            after = decay * before + (1 - decay) * new
            if cache is not None and cache.lengths is not None:  # padding tokens do not change the state
                after = torch.where((t < cache.lengths)[:, None], after, before)
            averages.append(after)
        if cache is not None:
            cache.set_states(self.layer, averages[-1])
        return self.out_proj(torch.stack(averages[1:]) * F.silu(gate))
