"""Forward passes for text generation with a model that is distributed over ranks.

One rank is the leader. The leader decides which tokens a pass reads, sends these tokens to the other ranks (`Pass`),
and receives the logits of the last stage. The other ranks run the same passes on their stages and shards until the
leader stops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.batch import Batch
from megatron.core.collectives import all_gather
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.pipeline_parallel.executor import PipelineExecutor
from megatron.core.pipeline_parallel.layout import PipelineLayout
from megatron.core.pipeline_parallel.p2p import PipelineP2P
from megatron.core.pipeline_parallel.passes import add_communication
from megatron.core.pipeline_parallel.schedules import forward_only
from megatron.extensions.use.inference.generation.kv_cache import Cached, KeyValueCache

Forward = Callable[[Tensor | None, tuple[Batch, Cached]], Tensor]


@dataclass(frozen=True)
class Pass:
    """Forward pass over the new tokens of the sequences in consecutive cache rows."""

    first: int = 0
    """Index of the first cache row that the pass uses."""

    tokens: tuple[tuple[int, ...], ...] = ()
    """Token ids that the pass appends to each row. A pass without tokens only checks that all ranks are alive."""

    drop: tuple[int, ...] = ()
    """Cache rows to remove before the pass, in this order."""

    prompt_logprobs: int | None = None
    """If not None, the pass must cover a single row and returns the log-probability of each prompt token except the
    first. At each position, the pass also returns the log-probabilities of the `prompt_logprobs` most likely tokens."""


@dataclass(frozen=True)
class Outputs:
    """Results of a forward pass, which only the leader receives."""

    logits: Tensor
    """Logits [b, vocab_size] after the last new token of each row."""

    prompt: Tensor | None = None
    """Log-probabilities of the prompt tokens except the first, as a tensor [s - 1, 1 + 2 * n] in fp64. Each row
    contains the log-probability of a token, then the ids of the n most likely tokens, and then their
    log-probabilities."""


class StageRunner:
    """Object that runs the pipeline stages of one rank during text generation. A StageRunner owns the key/value cache
    of the rank's stages, and exchanges messages with the other ranks. `stages` maps the number of each pipeline stage
    on this rank to the stage's module. `layout` contains the pipeline rank of each stage. `control` contains the ranks
    of the model, with the leader first. By default, `control` contains the tensor- and pipeline-parallel ranks of
    `state`. If experts are sharded over several data-parallel ranks, `control` must also contain these ranks.
    """

    def __init__(
        self,
        stages: Mapping[int, GPTModel],
        state: ParallelState | None = None,
        layout: PipelineLayout | None = None,
        control: Axis | None = None,
    ) -> None:
        state, self.layout = state or ParallelState(), layout or PipelineLayout()
        self.stages, self.pp = dict(sorted(stages.items())), state.pp
        self.control = state.axis("mp") if control is None else control
        model = next(iter(stages.values()))
        self.config, parameter = model.config, next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.multiple = state.tp.size if model.sequence_parallel else 1
        forwards: dict[int, Forward] = {stage: partial(_with_cache, model) for stage, model in stages.items()}
        self.p2p = PipelineP2P(self.pp, (0, 0, self.config.residual_size), self.dtype, self.device, lanes=state.lanes)
        self.executor = PipelineExecutor[Forward, tuple[Batch, Cached]](forwards, self.layout, self.p2p)
        self._actions = add_communication(forward_only(self.layout, 1))[self.pp.rank]
        leader, last = self.control.ranks[0], self.layout.rank_of(self.layout.num_stages - 1)
        self.leads = self.control.rank == 0
        self.source = self.pp.ranks[last] if self.leads else None
        """Rank that sends the logits to the leader. The field is None on all ranks except the leader."""
        self.sends_to = leader if self.pp.ranks[0] == leader and self.pp.rank == last else None
        self.cache = KeyValueCache()
        wire = "cpu" if self.control.group is None or dist.get_backend(self.control.group) == "gloo" else self.device
        self.wire = torch.device(wire)
        """Device of the tensors in messages between the leader and the other ranks."""

    @torch.inference_mode()
    def run(self, step: Pass) -> Outputs | None:
        """Run a pass on all ranks. Only the leader calls this method."""
        assert self.leads
        self._broadcast(step)
        return self._pass(step)

    @torch.inference_mode()
    def follow(self) -> None:
        """Run the passes of the leader until the leader stops. All ranks except the leader call this method."""
        while (step := self._broadcast(None)) is not None:
            self._pass(step)

    def stop(self) -> None:
        """Make `follow` return on the other ranks. Only the leader calls this method."""
        self._broadcast(None)

    def _broadcast(self, step: Pass | None) -> Pass | None:
        if self.control.size == 1:
            return step
        message = [step]
        dist.broadcast_object_list(message, self.control.ranks[0], self.control.group, self.wire)
        return message[0]

    def _pass(self, step: Pass) -> Outputs | None:
        for row in step.drop:
            self.cache.drop(row)
        if not step.tokens:
            return None
        counts = [len(tokens) for tokens in step.tokens]
        cached = self.cache.extend(counts, self.device, step.first, self.multiple)
        rows = [[*tokens, *[0] * (cached.width - len(tokens))] for tokens in step.tokens]
        tokens = torch.tensor(rows, device=self.device)
        nothing = torch.zeros_like(tokens)
        positions = cached.positions.clamp(max=self.config.max_positions - 1)  # clamp padding
        batch = Batch(tokens, nothing, nothing, nothing[:, 0], positions)
        with self.p2p.shaped((cached.width // self.multiple, len(rows), self.config.residual_size)):
            ended = self.executor.run(self._actions, [(batch, cached)], last_forward=lambda last, *given: last(*given))
        found = None
        # `ended` is empty on ranks that do not run the last stage.
        for hidden in ended:
            model = self.stages[self.layout.num_stages - 1]
            hidden = all_gather(hidden, model.tp) if model.sequence_parallel else hidden
            found = self._outputs(model, hidden, tokens, counts, step)
        return self._to_leader(found, len(rows), counts, step)

    def _outputs(self, model: GPTModel, hidden: Tensor, tokens: Tensor, counts: list[int], step: Pass) -> Outputs:
        """Compute the `Outputs` of a pass from the hidden states [s, b, h] that the last pipeline stage returns.
        `counts` contains the number of new tokens of each sequence."""
        last = torch.tensor(counts, device=self.device) - 1
        logits = next_logits(model, hidden[last, torch.arange(len(counts), device=self.device)])
        prompt = None
        if step.prompt_logprobs is not None:
            parts = [
                token_logprobs(next_logits(model, part), target, step.prompt_logprobs)
                for part, target in zip(
                    hidden[: counts[0] - 1, 0].split(CHUNK), tokens[0, 1 : counts[0]].split(CHUNK), strict=True
                )
            ]
            prompt = torch.cat([*parts, logits.new_zeros(0, 1 + 2 * step.prompt_logprobs, dtype=torch.float64)])
        return Outputs(logits, prompt)

    def _to_leader(self, found: Outputs | None, rows: int, counts: list[int], step: Pass) -> Outputs | None:
        """Send the outputs of a pass from one rank of the last pipeline stage to the leader rank. `rows` is the number
        of sequences."""
        mine = self.control.ranks[self.control.rank]
        if self.leads and self.source == mine:
            return found
        shapes: list[tuple[tuple[int, int], torch.dtype]] = [((rows, self.config.vocab_size or 0), self.dtype)]
        if step.prompt_logprobs is not None:
            shapes.append(((counts[0] - 1, 1 + 2 * step.prompt_logprobs), torch.float64))
        if self.leads:
            received = []
            for shape, dtype in shapes:
                received.append(torch.empty(shape, dtype=dtype, device=self.p2p.wire_device))
                dist.recv(received[-1], self.source, group=self.pp.group)
            return Outputs(*(x.to(self.device) for x in received))
        if found is not None and self.sends_to is not None:
            for x in (found.logits, found.prompt)[: len(shapes)]:
                assert x is not None
                dist.send(x.to(self.p2p.wire_device).contiguous(), self.sends_to, group=self.pp.group)
        return None


def _with_cache(model: GPTModel, hidden: Tensor | None, given: tuple[Batch, Cached]) -> Tensor:
    return model.hidden_states(hidden, *given)


CHUNK = 256
"""Number of prompt tokens whose logits are in memory at the same time."""


def next_logits(model: GPTModel, hidden: Tensor) -> Tensor:
    """Compute, on the last stage, the logits [n, vocab_size] of the next token for each row of the unsharded hidden
    states [n, h]."""
    assert model.output_layer is not None, "only the last stage has logits"
    # With sequence parallelism, the output layer gathers an identical copy of `hidden` from each rank along dim 0.
    logits = model.output_layer(hidden[None])
    return model.whole_logits(logits[:1])[0]


def token_logprobs(logits: Tensor, tokens: Tensor, top: int) -> Tensor:
    """Return the log-probabilities of `tokens` and of the `top` most likely tokens. logits: [n, vocab]. tokens: [n].
    Returns [n, 1 + 2 * top] in fp64. A row contains the token's log-probability, then the ids of the `top` most likely
    tokens, and then their log-probabilities."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logprobs = logits.to(wide).log_softmax(-1)
    best = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
    own = logprobs.gather(1, tokens[:, None])
    return torch.cat((own.double(), best.indices.double(), best.values.double()), dim=1)
