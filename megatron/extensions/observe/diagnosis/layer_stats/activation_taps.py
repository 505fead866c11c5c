"""Hooks that measure the outputs, attention logits and routers of a model's layers.

The measurement is the same under every parallel layout. For a mean of squares, every rank measures a sum of squares and
a number of elements, and both are summed over all ranks. Ranks that hold replicas of the same activations contribute to
both sums, so the ratio of the sums equals the mean that a single process computes. The measurement works for any layer,
including custom layers. Hooks measure the output of each layer, and the output of each submodule with a weight matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from megatron.core.attention.core_attention import CoreAttention
from megatron.core.attention.logits import LargestLogits
from megatron.core.compiled_regions import region
from megatron.core.models.gpt.embedding import VocabParallelEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.moe.load_balancing import Balance
from megatron.core.transformer.block import Stream, TransformerBlock, added
from megatron.core.transformer.recompute import computing_again
from megatron.extensions.observe.diagnosis.layer_stats.alarms import OUTPUT

Key = tuple[str, int]
"""Pair (statistic, layer number in the model). Layers of multi-token prediction modules are numbered after the last
layer."""

QUERIES = "query_norm"
KEYS = "key_norm"
LOGITS = "attention_logit_max"
"""Attention statistics. Their values are maxima, not means. The query norm includes the softmax scale, so no attention
logit exceeds the product of the query norm and the key norm."""

ENTROPY, LOAD = "router_entropy", "expert_load"

LOOKED_UP, LOOKUPS = "looked_up_squares", "lookups"
"""Statistics of embedding lookups on each tensor-parallel rank: the sum of squares of the embedding rows that were
looked up, and the number of lookups. Each `Key` of these statistics contains a tensor-parallel rank instead of a layer
number.
"""


class ActivationTaps:
    """Measurements of the layers in one rank's pipeline stages since the last call of `begin`: sums, element counts and
    maxima."""

    def __init__(self, stages: Mapping[int, GPTModel], device: torch.device, compiled: bool) -> None:
        self.active = False
        self.device = device
        self.sums: dict[Key, Tensor] = {}
        self.counts: dict[Key, float] = {}
        self.maxima: dict[Key, Tensor] = {}
        self.logits: dict[int, LargestLogits] = {}
        """Largest attention logits by layer number, for layers whose attention kernel exposes its logits."""
        self.balances: dict[int, Balance] = {}
        self._measure = region(sum_of_squares_of_rows, compiled)
        for model in stages.values():
            for block, number, layer in _layers(model):
                self._watch(block, number, layer)
            if model.embedding is not None and model.tp.size > 1:
                table = model.embedding.word_embeddings
                for rank in range(table.axis.size):
                    self._begin(self.sums, LOOKED_UP, rank)
                    self._begin(self.sums, LOOKUPS, rank)
                table.register_forward_hook(self._lookup)

    def _watch(self, block: TransformerBlock, number: int, layer: nn.Module) -> None:
        block.watch[id(layer)] = partial(self._output, self._begin(self.sums, OUTPUT, number))
        for name, module in layer.named_children():
            if any(parameter.meta.matrix for parameter in module.parameters()):  # type: ignore[attr-defined]
                key = self._begin(self.sums, f"{name.removeprefix('self_')}_output_rms", number)
                module.register_forward_hook(partial(self._module_output, key))
        for module in layer.modules():
            if isinstance(module, CoreAttention):
                if module.in_torch:
                    self.logits[number] = LargestLogits(module)
                    self._begin(self.maxima, LOGITS, number)
                else:
                    keys = self._begin(self.maxima, QUERIES, number), self._begin(self.maxima, KEYS, number)
                    module.register_forward_pre_hook(partial(self._heads, keys))
            elif isinstance(module, Balance):
                self.balances[number] = module
                module.register_forward_pre_hook(partial(self._probabilities, self._begin(self.sums, ENTROPY, number)))

    def _begin(self, table: dict[Key, Tensor], statistic: str, number: int) -> Key:
        table[statistic, number] = torch.zeros((), dtype=torch.float64, device=self.device)
        return statistic, number

    def begin(self, active: bool) -> None:
        """Begin a step. If `active` is True, clear all measurements, and measure all passes until `end` is called.
        Otherwise, measure nothing in this step."""
        self.active = active
        if not active:
            return
        self.counts = dict.fromkeys(self.sums, 0.0)
        for value in self.sums.values():
            value.zero_()
        for value in self.maxima.values():
            value.fill_(float("-inf"))
        for logits in self.logits.values():
            logits.clear()

    def end(self) -> None:
        """Collect the largest attention logits, and stop measuring. Call this method after the last backward pass and
        before the update."""
        for number, logits in self.logits.items():
            self.maxima[LOGITS, number].copy_(logits.values.max())
        self.active = False

    def loads(self) -> dict[int, Tensor]:
        """Return the numbers of tokens [E] that this rank's routers assigned to the experts, keyed by layer number.
        Call this method before the update."""
        return {number: balance.tally[: balance.num_experts] for number, balance in self.balances.items()}

    @torch.no_grad()
    def _output(self, key: Key, stream: Stream) -> None:
        if self._measures():
            self._add(key, added(stream))

    def _module_output(self, key: Key, module: nn.Module, args: object, output: object) -> None:
        if self._measures() and isinstance(output, Tensor) and output.is_floating_point():
            self._add(key, output)

    @torch.no_grad()
    def _add(self, key: Key, x: Tensor) -> None:
        self.sums[key].add_(self._measure(x.detach()))
        self.counts[key] += x.numel()

    @torch.no_grad()
    def _lookup(self, table: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        """Measure an embedding lookup: add the squared norms of the looked-up rows to the sums, and count the rows.
        `args` contains tokens [b, s]. `out` is [s, b, h], or [s/tp, b, h] with sequence parallelism."""
        if self._measures():
            assert isinstance(table, VocabParallelEmbedding)
            tokens, tp = args[0].t(), table.axis
            own = tokens if len(out) == len(tokens) else tokens.chunk(tp.size)[tp.rank]
            squares = torch.linalg.vector_norm(out.detach(), dim=-1, dtype=_precise(out)).double().square()
            for rank in range(tp.size):
                there = own // (table.vocab_rows // tp.size) == rank
                self.sums[LOOKED_UP, rank].add_((squares * there).sum())
                self.sums[LOOKUPS, rank].add_(there.sum())

    @torch.no_grad()
    def _heads(self, keys: tuple[Key, Key], core: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Measure the norms of queries and keys. `args` starts with q [s, b, heads, d] and k [s, b, groups, d]."""
        if self._measures():
            assert isinstance(core, CoreAttention)
            for key, x, scale in zip(keys, args, (core.scale, 1.0), strict=False):
                largest = torch.linalg.vector_norm(x.detach(), dim=-1, dtype=_precise(x)).max() * abs(scale)
                torch.maximum(self.maxima[key], largest, out=self.maxima[key])

    @torch.no_grad()
    def _probabilities(self, key: Key, balance: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Measure the entropy of a router's probabilities. `args` starts with the weights, the logits and the
        probabilities of the router. The probabilities have the shape [s, b, E]."""
        if self._measures():
            p = args[2].detach()
            self.sums[key].add_(torch.special.entr(p).sum(dtype=torch.float64))
            self.counts[key] += p.shape[:-1].numel()

    def _measures(self) -> bool:
        return self.active and not computing_again()


def sum_of_squares_of_rows(x: Tensor) -> Tensor:
    """Return the sum of squares of x [..., h] as a float64 scalar. Each row is summed in fp32, or in fp64 if x is
    fp64."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=_precise(x)).double().square().sum()


def _precise(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _layers(model: GPTModel) -> Iterator[tuple[TransformerBlock, int, nn.Module]]:
    """Yield a tuple (block, layer number in the model, layer) for each transformer layer, including the layers of
    multi-token prediction modules."""
    for layer in model.decoder.layers:
        yield model.decoder, int(layer.number), layer  # type: ignore[arg-type]
    for module in model.mtp.layers if model.mtp is not None else ():
        for layer in module.transformer.layers:  # type: ignore[union-attr]
            yield module.transformer, int(module.number), layer  # type: ignore[misc, arg-type]
