"""Router that selects experts by token id (Hash Layers, arXiv 2106.04426; DeepSeek-V4)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron.core.batch import BatchContext
from megatron.core.config.model import TransformerConfig
from megatron.core.moe.load_balancing import make_state
from megatron.core.moe.router import TopKRouter
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.layers import TPContext


class HashRouter(TopKRouter):
    """Router that selects k experts for each token by looking up the token id in a fixed table. As in `TopKRouter`, the
    router scores are the weights of the expert outputs."""

    def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        config = replace(config, moe_router_enable_expert_bias=False, moe_router_load_balancing_type=("none",))
        super().__init__(name, config, ctx)
        shape, init = (config.vocab_size or 0, config.moe_router_topk), Init("choices", high=self.num_experts)
        self.tid2eid = make_state(ParamMeta(f"{name}.tid2eid", shape, init=init, role="state"), torch.int64, ctx)
        """Table [vocabulary, k] with the k experts of each token id. The parameter has the same name as in
        Megatron-LM."""

    def _chosen(self, logits: Tensor, ranked: Tensor, unbiased: Tensor, context: BatchContext) -> Tensor:
        assert context.tokens is not None
        rows = slice(self.shard * len(logits), (self.shard + 1) * len(logits))
        return self.tid2eid[context.tokens.t()[rows]]
