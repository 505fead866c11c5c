"""Compares every gradient of a dump with this program's fp64 gradient, in the order of the backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from megatron.testing.referee.attribution import Verdict, difference, fraction, judge
from megatron.testing.referee.dumps import Dump
from megatron.testing.referee.reference import Batch, Gradients, Model, Watched

MARGIN = 4.0
"""Allowed ratio between the dump's distance from fp64 and this program's distance in the dump's number format.

The other program may add in another order.
"""

LEAST_ALLOWED = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}
"""Relative difference that is always allowed, by number format, because small tensors may be exact by chance."""

PARTS = (2, 4, 8)
"""Numbers of ranks tried for gradients that contain only one rank's part of a sum."""


@dataclass(frozen=True)
class Judgement:
    """Verdict on a dump."""

    loss: float
    found_loss: float | None
    allowed_loss: float
    rows: dict[str, Verdict]
    """Verdicts by parameter, in backward order."""

    missing: tuple[str, ...]
    """Parameters without a gradient in the dump."""

    @property
    def loss_differs(self) -> bool:
        if self.found_loss is None:
            return False
        return not abs(self.found_loss - self.loss) <= self.allowed_loss * abs(self.loss)

    @property
    def first(self) -> str | None:
        """The first wrong gradient of the backward pass."""
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
        ((cause, count),) = Counter(verdict.cause for verdict in wrong.values()).most_common(1)
        if count > 1 and count == len(wrong) == len(self.rows):
            yield f"all gradients share it: {cause}; look at the scale of the loss, or at the average over ranks"
        elif count > 1:
            yield f"{count} of {len(wrong)} share the cause: {cause}"
        names = list(self.rows)
        rest = names[names.index(self.first) :]
        if len(wrong) == len(rest) > 1:
            yield "all gradients after it differ too, as the gradient of its input would be wrong"


def judgement_of(model: Model, batch: Batch, dump: Dump, loss: float | None) -> Judgement:
    """Judge another program's gradients of a batch.

    Args:
        model: The model, with the number format of the dump.
        batch: The batch from which the gradients were computed.
        dump: The gradients.
        loss: The other program's mean loss, if known.
    """
    exact = replace(model, number_format="fp64").gradients(batch)
    least = LEAST_ALLOWED[model.number_format]
    own = exact if model.number_format == "fp64" else model.gradients(batch)
    assert exact.loss is not None and own.loss is not None, "this program's own losses are known"
    rows, missing = {}, []
    for name, expected in exact.tensors.items():
        if name not in dump:
            missing.append(name)
            continue
        allowed = max(least, MARGIN * difference(own.tensors[name], expected))
        rows[name] = judge(dump.read(name), expected, allowed)
    of_loss = max(least, MARGIN * abs(own.loss - exact.loss) / abs(exact.loss))
    found = Judgement(exact.loss, loss, of_loss, rows, tuple(missing))
    return found if found.first is None else replace(found, rows=rows | _first_looked_at(model, batch, dump, found))


def _first_looked_at(model: Model, batch: Batch, dump: Dump, found: Judgement) -> dict[str, Verdict]:
    """Determine whether the first wrong gradient is only part of a sum: over some labels, samples or positions."""
    assert found.first is not None
    verdict = found.rows[found.first]
    if verdict.explained:
        return {}
    gradient, exact = dump.read(found.first), replace(model, number_format="fp64")
    for words, part in _parts(exact, batch, found.first):
        factor = _factor(gradient, part.tensors[found.first], verdict.allowed)
        if factor is not None:
            times = "" if factor == "1" else f", {factor} times as large"
            return {found.first: replace(verdict, cause=f"is summed over {words} alone{times}", explained=True)}
    return {}


def _parts(model: Model, batch: Batch, name: str) -> Iterator[tuple[str, Gradients]]:
    """Yield (words, gradients) of parts that one rank may have summed without the others."""
    samples, length = batch.tokens.shape
    for count in PARTS:
        for block in range(count if length >= count else 0):
            words = f"places {length * block // count} to {length * (block + 1) // count - 1} of the sequence"
            yield f"{words} (block {block} of {count})", model.gradients(batch, Watched(name, (block, count)))
    for count in (count for count in PARTS if length >= count):
        for block in range(count):
            tokens = slice(length * block // count, length * (block + 1) // count)
            part = batch.part(slice(None), tokens)
            if part.loss_mask.any():
                yield f"the labels of block {block} of {count} of the sequence", model.gradients(part)
    for sample in range(samples if 1 < samples <= 16 else 0):
        part = batch.part(slice(sample, sample + 1), slice(None))
        if part.loss_mask.any():
            yield f"sample {sample}", model.gradients(part)


def _factor(found: Tensor, part: Tensor, allowed: float) -> str | None:
    """Return the factor between a gradient and the gradient of a part; None if they are not proportional."""
    scale = (part * part).sum().item()
    factor = (found * part).sum().item() / scale if scale else 0.0
    if not factor or difference(found, factor * part) > allowed:
        return None
    return fraction(factor, allowed)
