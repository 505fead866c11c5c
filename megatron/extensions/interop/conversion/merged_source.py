"""Conversion source that provides the weighted mean of several models. The models' copies of a tensor are read one
after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import PurePath

import torch
from torch import Tensor

from megatron.extensions.interop.conversion.convert import recognize
from megatron.extensions.interop.conversion.formats import Options, Source, TrainingState, few
from megatron.training.config.flags import EXTENSION_SECTIONS
from megatron.training.config.saved_flags import WITH_PARAMETERS, changed_fields, free_choices

STATE = "--optimizer-state"
WITHOUT_STATE = "remove the flag to merge only weights"


@dataclass(frozen=True)
class Part:
    """Model to merge."""

    path: PurePath
    source: Source
    weight: float


class MergedSource(Source):
    """Conversion source that returns the weighted mean of models with the same architecture.

    The tensors of the models are added in the order of `parts`, and only the sum is rounded to the output dtype. The
    sum is computed in fp64 if a model stores the tensor in fp64, and otherwise in fp32. For each tensor, a process
    holds only the sum and the tensor of one model in memory, regardless of the number of models. If the run trained in
    16-bit precision, the optimizer's fp32 weights are averaged instead of the 16-bit weights. The configuration and the
    progress are taken from the last model whose checkpoint records its progress. If no checkpoint records its progress,
    the last model's configuration is used. The tokenizer files are taken from the last model that has tokenizer files.

    The constructor raises ValueError if the models in `parts` have different parameters, or would compute different
    outputs from equal parameters. Reading a tensor raises ValueError if the tensor contains NaN or infinite values.
    """

    def __init__(self, parts: Sequence[Part], merged: dict[str, object], with_state: bool) -> None:
        self.parts, self.merged = parts, merged
        self.with_state = with_state
        refuse_different(parts)
        saved = [part.source for part in parts if part.source.progress is not None]
        last = (saved or [part.source for part in parts])[-1]
        self.config, self.metas = last.config, last.metas
        self.progress = last.progress
        self.origin = next((s.origin for s in self._newest() if s.origin.model_type is not None), last.origin)
        self.side_files = next((source.side_files for source in self._newest() if source.side_files), {})
        named = [set(part.source.states) for part in parts]
        self.states = [name for name in last.states if all(name in names for names in named)]
        self.notes = tuple(self._remarks(set().union(*named)))

    def _newest(self) -> Iterator[Source]:
        return (part.source for part in reversed(self.parts))

    def _remarks(self, states: set[str]) -> Iterator[str]:
        for part in self.parts:
            yield from (f"{part.path}: {note}" for note in part.source.notes)
        if lost := sorted(states.difference(self.states)):
            yield f"not all models have {few(lost, 3)}; these tensors are initialized as in a new model"

    def dtype(self, name: str, wanted: torch.dtype | None) -> torch.dtype:
        """Return `wanted`. If `wanted` is None, promote the dtypes in which the models store the parameter, and return
        the promoted dtype."""
        return wanted or reduce(torch.promote_types, (part.source.dtype(name, None) for part in self.parts))

    def read(self, name: str, wanted: torch.dtype | None) -> Tensor:
        dtype = self.dtype(name, wanted)
        if not self.dtype(name, None).is_floating_point:
            return self.parts[-1].source.read(name, wanted)
        precision = _precision(self.dtype(name, None))
        reads = (partial(part.source.read, name, precision) for part in self.parts)
        return self._mean(name, precision, reads).to(dtype)

    def _mean(self, name: str, precision: torch.dtype, reads: Iterable[Callable[[], Tensor]]) -> Tensor:
        """Return the weighted sum, computed in `precision`, of the models' tensors named `name`. `reads` contains one
        function per model, and each function reads the tensor of its model."""
        total: Tensor | None = None
        for part, read in zip(self.parts, reads, strict=True):
            tensor = read()
            _refuse_not_finite(tensor, name, part.path)
            if total is None:
                total = torch.zeros(tensor.shape, dtype=precision)
            total.add_(tensor, alpha=part.weight)
        assert total is not None
        return total

    def check_data(self) -> None:
        for part in self.parts:
            part.source.check_data()

    def training(self) -> TrainingState | None:
        """Return the mean of the optimizer states, together with the last model's training progress. Return None if
        only weights are merged."""
        if not self.with_state:
            return None
        states = [self._state(part) for part in self.parts]
        first, last = states[0], states[-1]
        for part, state in zip(self.parts, states, strict=True):
            if state.kinds != first.kinds:
                kinds, others = (", ".join(each.kinds) for each in (state, first))
                raise ValueError(
                    f"{STATE}: {part.path} has {kinds}, but {self.parts[0].path} has {others}; {WITHOUT_STATE}"
                )
            if part.weight < 0:
                rule = "means of squared gradients must not be"
                raise ValueError(f"{STATE}: the weight of {part.path} is negative, which {rule}; {WITHOUT_STATE}")

        def read(kind: str, name: str) -> Tensor:
            dtype = last.dtype(kind, name)
            reads = (partial(state.read, kind, name) for state in states)
            return self._mean(f"{kind} of {name}", _precision(dtype), reads).to(dtype)

        return replace(last, read=read)

    @staticmethod
    def _state(part: Part) -> TrainingState:
        state = part.source.training()
        if state is None:
            raise ValueError(f"{STATE}: {part.path} has no optimizer state; {WITHOUT_STATE}")
        return state


def _precision(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _refuse_not_finite(tensor: Tensor, name: str, path: PurePath) -> None:
    """Raise ValueError if a tensor contains NaN or infinite values. The check does not copy the tensor."""
    if not tensor.numel():
        return
    least, largest = (float(end) for end in tensor.aminmax())
    if least != least or largest != largest:
        raise ValueError(f"{path}: {name} contains NaN; remove this checkpoint from the merge")
    if max(-least, largest) == float("inf"):
        raise ValueError(f"{path}: {name} contains infinite values; remove this checkpoint from the merge")


def refuse_different(parts: Sequence[Part]) -> None:
    """Raise ValueError if two models have different parameters, or would compute different outputs from equal
    parameters."""
    one = parts[0]
    for two in parts[1:]:
        if problems := [*_other_tensors(one, two), *_other_fields(one, two)]:
            raise ValueError(
                f"{two.path} is a different model from {one.path}: {few(problems, 5)}; merge checkpoints of one model"
            )


def _other_tensors(one: Part, two: Part) -> Iterator[str]:
    before, now = one.source.metas, two.source.metas
    for name in sorted(before.keys() ^ now.keys()):
        yield f"{name} is only in {one.path if name in before else two.path}"
    for name in (name for name in before if name in now):
        shapes = [list(metas[name].global_shape) for metas in (before, now)]
        if shapes[0] != shapes[1]:
            yield f"{name} has shape {shapes[1]}, not {shapes[0]}"


def _other_fields(one: Part, two: Part) -> list[str]:
    saved, run = one.source.config, two.source.config
    # Fields in `WITH_PARAMETERS` are ignored here, because `_other_tensors` compares the parameters.
    ignored = free_choices(saved) | WITH_PARAMETERS
    return changed_fields(saved, run, EXTENSION_SECTIONS, ignored, (f"in {one.path.name}", f"in {two.path.name}"))


def opened_alike(paths: Sequence[PurePath], options: Options) -> list[Source]:
    """Open models. If the format of a model pads the vocabulary on reading, the models are padded to the largest
    vocabulary size of all models.

    Raises ValueError if a path does not contain a model.
    """
    sources = [recognize(path).open(path, options) for path in paths]
    rows = [source.config.model.padded_vocab_size for source in sources]
    padded = replace(options, make_vocab_size_divisible_by=max(rows))
    return [
        source if count == max(rows) else recognize(path).open(path, padded)
        for path, source, count in zip(paths, sources, rows, strict=True)
    ]
