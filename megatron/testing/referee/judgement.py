"""Comparison of every gradient in a dump with the fp64 gradient that this program computes, in the order of the
backward pass."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from megatron.testing.referee.attribution import Verdict, difference, fraction, judge
from megatron.testing.referee.batch import Batch
from megatron.testing.referee.dumps import Dump
from megatron.testing.referee.reference import Model, Watched, WatchedInputs

MARGIN = 4.0
"""Factor by which the error of a gradient in the dump may exceed the error of this program in the same number format.
Both errors are differences from the fp64 gradient.

The factor is above 1 because the other program may sum in a different order.
"""

LEAST_ALLOWED = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}
"""Relative difference that is always allowed, for each number format. Without this minimum, a small tensor that happens
to be exact in this program would allow no difference."""

PARTS = (2, 4, 8)
"""Numbers of ranks to try when a gradient may contain only one rank's part of a sum. The largest number in `PARTS` is
also the number of blocks into which a long sequence is divided."""

MOST_SAMPLES = 16
"""Largest batch size for which the gradient of each sample is computed separately."""


@dataclass(frozen=True)
class Judgement:
    """Verdict on the gradients in a dump."""

    loss: float
    found_loss: float | None
    allowed_loss: float
    rows: dict[str, Verdict]
    """Verdicts keyed by parameter name, in the order of the backward pass."""

    missing: tuple[str, ...]
    """Names of the parameters for which the dump contains no gradient."""

    @property
    def loss_differs(self) -> bool:
        if self.found_loss is None:
            return False
        return not abs(self.found_loss - self.loss) <= self.allowed_loss * abs(self.loss)

    @property
    def first(self) -> str | None:
        """Name of the first parameter of the backward pass that has a wrong gradient, or None if all gradients are
        correct."""
        return next((name for name, verdict in self.rows.items() if not verdict.equal), None)

    @property
    def equal(self) -> bool:
        return self.first is None and not self.loss_differs

    def summary(self) -> Iterator[str]:
        """Summarize the first difference, and properties that all differences share."""
        if self.found_loss is not None:
            word = "differs from" if self.loss_differs else "equals"
            yield f"loss {self.found_loss:.9g} {word} {self.loss:.9g}, of which {self.allowed_loss:.1e} is allowed"
        wrong = {name: verdict for name, verdict in self.rows.items() if not verdict.equal}
        yield f"{len(self.rows) - len(wrong)} of {len(self.rows)} gradients are equal" + (
            f"; the dump has none of {len(self.missing)} parameters: {', '.join(self.missing[:3])}"
            if self.missing
            else ""
        )
        if self.first is None:
            return
        yield f"first in the backward pass: {self.first} {wrong[self.first].cause}"
        if all(verdict.unrelated for verdict in self.rows.values()):
            yield "no gradient resembles the model's; check that the weights and the batch are those of the dump"
            return
        ((cause, count),) = Counter(verdict.cause for verdict in wrong.values()).most_common(1)
        if count > 1 and count == len(wrong) == len(self.rows):
            yield f"all gradients share it: {cause}; look at the scale of the loss, or at the average over ranks"
        elif count > 1:
            yield f"{count} of {len(wrong)} share the cause: {cause}"
        names = list(self.rows)
        rest = names[names.index(self.first) :]
        if len(wrong) == len(rest) > 1:
            yield "all gradients after it differ too, so the input gradient of its module may be wrong"


def judgement_of(model: Model, batch: Batch, dump: Dump, loss: float | None) -> Judgement:
    """Judge the gradients that another program computed on a batch.

    Args:
        model: The model, with the number format in which the other program computed its gradients.
        batch: The batch on which the other program computed its gradients.
        dump: The gradients.
        loss: The other program's mean loss, if known.
    """
    exact = replace(model, number_format="fp64").gradients(batch)
    least = LEAST_ALLOWED[model.number_format]
    own = exact if model.number_format == "fp64" else model.gradients(batch)
    rows, missing = {}, []
    for name in exact:
        if name not in dump:
            missing.append(name)
            continue
        expected = exact[name]
        allowed = max(least, MARGIN * difference(own[name], expected))
        rows[name] = judge(dump.read(name), expected, allowed)
    of_loss = max(least, MARGIN * abs(own.loss - exact.loss) / abs(exact.loss))
    found = Judgement(exact.loss, loss, of_loss, rows, tuple(missing))
    return found if found.first is None else replace(found, rows=rows | _first_looked_at(model, batch, dump, found))


def _first_looked_at(model: Model, batch: Batch, dump: Dump, found: Judgement) -> dict[str, Verdict]:
    """Test whether the first wrong gradient is only a partial sum, for example because it omits some positions, labels
    or samples."""
    assert found.first is not None
    verdict = found.rows[found.first]
    if verdict.explained:
        return {}
    gradient, exact = dump.read(found.first), replace(model, number_format="fp64")
    for sum_over in (_over_places, _over_features, _over_labels, _over_samples):
        for words, part, share in sum_over(exact, batch, found.first):
            factor = _factor(gradient, part, verdict.allowed)
            if factor is not None:
                cause = f"is summed over {words} alone{_times(factor, share, verdict.allowed)}"
                return {found.first: replace(verdict, cause=cause, explained=True)}
    return {}


Part = tuple[str, Tensor, float]
"""Candidate for a partial sum that a wrong gradient may equal. The tuple contains a description of the part of the
batch, the gradient summed over only this part, and the fraction of the batch's tokens in this part."""


def _times(factor: float, share: float, allowed: float) -> str:
    """Describe the factor by which a gradient differs from the sum over a part of the batch."""
    if share and abs(factor * share - 1) <= allowed and share < 1:
        return ", and divided by the number of tokens in this part"
    times = fraction(factor, allowed)
    return "" if times == "1" else f", {times} times as large"


def _over_places(model: Model, batch: Batch, name: str) -> Iterator[Part]:
    """Yield partial sums of the gradient, each over some blocks of sequence positions. The other program may have
    forgotten to add the sums of all sequence-parallel or context-parallel ranks, each of which covers one block."""
    length = batch.tokens.shape[1]
    count = _blocks(length)
    terms = [model.gradients(batch, Watched(name, (block, count)))[name] for block in range(count)]
    for chosen, remark in sequence_parts(count):
        yield f"{_places(length, count, chosen)} of the sequence{remark}", _sum_of(terms, chosen), 1.0


def _over_features(model: Model, batch: Batch, name: str) -> Iterator[Part]:
    """Yield partial sums of the gradient, each over some shards of the features that enter the next row-parallel layer,
    such as attention heads. The other program may have forgotten to add the sums of all tensor-parallel ranks, each of
    which covers one shard."""
    metas = model.source.metas
    last = next((each for each in next_row_parallel(name) if each in metas), None)
    if last is None or last == name:
        return
    features = prod(metas[last].global_shape[1:])
    count = next((count for count in reversed(PARTS) if features % count == 0), 1)
    terms = [model.gradients(batch, WatchedInputs(last, (block, count)))[name] for block in range(count)]
    for parts in (parts for parts in PARTS if count % parts == 0):
        for shard in range(parts):
            chosen = range(count * shard // parts, count * (shard + 1) // parts)
            words = f"the inputs {shard * features // parts} to {(shard + 1) * features // parts - 1}"
            yield f"{words} of {last} (block {shard} of {parts})", _sum_of(terms, chosen), 1.0


def next_row_parallel(name: str) -> tuple[str, ...]:
    """Return the possible names of the row-parallel weight that is applied after parameter `name` in the same layer."""
    match = re.match(r"(.*layers\.\d+\.)(self_attention|input_layernorm|mlp|pre_mlp_layernorm)\b", name)
    if match is None:
        return ()
    if match[2] in ("mlp", "pre_mlp_layernorm"):
        return (f"{match[1]}mlp.linear_fc2.weight",)
    return tuple(f"{match[1]}self_attention.{last}.weight" for last in ("linear_proj", "out_proj"))


def _over_labels(model: Model, batch: Batch, name: str) -> Iterator[Part]:
    """Yield partial sums of the gradient. Each one is the gradient of the loss over the labels in some blocks of
    sequence positions."""
    length = batch.tokens.shape[1]
    count = _blocks(length)
    bounds = [slice(length * block // count, length * (block + 1) // count) for block in range(count)]
    terms = [_term(model, batch, batch.part(slice(None), block), name) for block in bounds]
    for chosen, remark in sequence_parts(count):
        words = f"the labels of {_places(length, count, chosen)} of the sequence{remark}"
        yield words, _sum_of(terms, chosen), _share(batch, [bounds[block] for block in chosen], by_sample=False)


def _over_samples(model: Model, batch: Batch, name: str) -> Iterator[Part]:
    """Yield partial sums of the gradient, each over one group of samples. The other program may have forgotten to add
    the sums of all data-parallel replicas or micro-batches, each of which covers one group of samples."""
    count = len(batch.tokens)
    if not 1 < count <= MOST_SAMPLES:
        return
    bounds = [slice(sample, sample + 1) for sample in range(count)]
    terms = [_term(model, batch, batch.part(sample, slice(None)), name) for sample in bounds]
    for chosen in sample_parts(count):
        numbers = ", ".join(map(str, chosen))
        words = f"sample{'s' if len(chosen) > 1 else ''} {numbers}"
        yield words, _sum_of(terms, chosen), _share(batch, [bounds[sample] for sample in chosen], by_sample=True)


def _blocks(length: int) -> int:
    """Return the number of blocks into which a sequence is divided."""
    return next((count for count in reversed(PARTS) if length >= count), 1)


def _term(model: Model, batch: Batch, part: Batch, name: str) -> Tensor:
    """Return the share of the batch gradient that comes from `part`. The batch gradient is the gradient of the mean
    loss over the batch."""
    tokens = float(part.loss_mask.sum())
    if not tokens:
        return torch.zeros((), dtype=torch.float64)
    return model.gradients(part)[name] * (tokens / float(batch.loss_mask.sum()))


def _share(batch: Batch, chosen: Sequence[slice], by_sample: bool) -> float:
    """Return the number of unmasked tokens in the chosen samples, as a fraction of all unmasked tokens in the batch. If
    `by_sample` is False, `chosen` contains ranges of positions instead of samples."""
    masks = [batch.loss_mask[each] if by_sample else batch.loss_mask[:, each] for each in chosen]
    return sum(float(mask.sum()) for mask in masks) / float(batch.loss_mask.sum())


def _sum_of(terms: Sequence[Tensor], chosen: Sequence[int]) -> Tensor:
    return torch.stack(torch.broadcast_tensors(*(terms[number] for number in chosen))).sum(0)


def _places(length: int, count: int, chosen: Sequence[int]) -> str:
    """Format the token positions of the blocks `chosen` as text, such as `places 0 to 7`. Consecutive blocks form one
    range."""
    ends = [length * block // count for block in range(count + 1)]
    starts = [block for block in chosen if block - 1 not in chosen]
    stops = [block + 1 for block in chosen if block + 1 not in chosen]
    return "places " + " and ".join(
        f"{ends[start]} to {ends[stop] - 1}" for start, stop in zip(starts, stops, strict=True)
    )


def sequence_parts(count: int) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield pairs (blocks of a sequence, remark) for sets of blocks that one rank may hold. The sets are equal shards,
    pairs of shards as in zig-zag context parallelism, and all ranges of consecutive blocks."""
    seen = {tuple(range(count))}
    shards = [parts for parts in PARTS if count % parts == 0]
    for parts in shards:
        for shard in range(parts):
            seen.add(chosen := tuple(range(count * shard // parts, count * (shard + 1) // parts)))
            yield chosen, f" (block {shard} of {parts})"
    for parts in (parts // 2 for parts in shards if parts > 2):
        size = count // (2 * parts)
        for rank in range(parts):
            other = 2 * parts - 1 - rank
            chosen = (*range(size * rank, size * (rank + 1)), *range(size * other, size * (other + 1)))
            if chosen not in seen:
                yield chosen, f" (rank {rank} of {parts} that divide it in zig-zag)"
    for start in range(count):
        for stop in range(start + 1, count + 1):
            if tuple(range(start, stop)) not in seen:
                yield tuple(range(start, stop)), ""


def sample_parts(count: int) -> Iterator[tuple[int, ...]]:
    """Yield groups of samples that one data-parallel replica may have processed. The function yields the groups that
    result if micro-batches are assigned to replicas in turn, and all ranges of consecutive samples."""
    found: dict[tuple[int, ...], None] = {}
    for replicas in range(2, count + 1):
        for size in (size for size in range(1, count) if count % (replicas * size) == 0):
            for rank in range(replicas):
                found[tuple(number for number in range(count) if number // size % replicas == rank)] = None
    for start in range(count):
        for stop in range(start + 1, count + 1):
            found[tuple(range(start, stop))] = None
    found.pop(tuple(range(count)))
    return iter(found)


def _factor(found: Tensor, part: Tensor, allowed: float) -> float | None:
    """Return the factor f with `found` = f * `part`, where `part` is the gradient of a part of the batch, or None if
    the gradients are not proportional."""
    scale = (part * part).sum().item()
    factor = (found * part).sum().item() / scale if scale else 0.0
    return factor if factor and difference(found, factor * part) <= allowed else None
