"""Samples of one step: tokens, labels, loss mask, and document boundaries within samples.

An `.npz` file contains the samples in Megatron-LM's form (the first list) or in transformers' form (the second list).
All arrays have the shape [samples, s]:

    tokens, labels      label i follows token i
    loss_mask           optional; 1 for labels that count
    position_ids        optional; positions of tokens in their documents. Only position tables use them
    document_ids        optional; tokens attend to tokens of the same document only, which are adjacent
    cu_seqlens          instead of document_ids: [n] for one sample, or [samples, n]. Starts of documents, and s

    input_ids           label i is token i, shifted by the model
    labels              optional; -100 does not count
    position_ids        optional; if the next three arrays are absent, a document begins where it does not grow by 1
    attention_mask      optional; 0 for padding after the text
    document_ids, cu_seqlens as above

transformers derives documents from position_ids only if the model is called without a cache (use_cache=False, which
Trainer sets). If a gradient dump of transformers was made with a cache, attention crossed document boundaries; in that
case, add an attention_mask of ones to the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from megatron.extensions.observe.diagnosis.step_dump import SAMPLES

IGNORED = -100
"""Label that excludes a token from the loss in transformers batches."""

Arrays = Mapping[str, NDArray[Any]]

OF_MEGATRON = ("tokens", "labels", "loss_mask", "position_ids", "document_ids", "cu_seqlens")
OF_TRANSFORMERS = ("input_ids", "labels", "position_ids", "attention_mask", "document_ids", "cu_seqlens")
OF_STEPS = ("sample_index", "source_ids")
"""Arrays in the folder of a saved training step that the reference does not use."""


@dataclass(frozen=True)
class Batch:
    """Samples of one step. All arrays have the shape [samples, s]."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    """Label at each position, which is the next token."""

    loss_mask: NDArray[np.float32]
    """Loss mask: 1 for labels that count for the loss, 0 for all others."""

    position_ids: NDArray[np.int64] | None = None
    """Positions of tokens, or None for 0 .. s-1."""

    document_ids: NDArray[np.int64] | None = None
    """Document id of each token, or None for one document per sample. Tokens attend only to tokens with the same id."""

    tables_only: bool = True
    """True if only position tables use `position_ids`, as in Megatron-LM. False if rotary embeddings also use
    `position_ids`, as in transformers."""

    @classmethod
    def read(cls, path: Path) -> Batch:
        """Read a batch from an `.npz` file or from the folder of a saved step.

        Raises ValueError if the arrays in the file are in neither Megatron-LM's form nor transformers' form, if their
        shapes differ, or if a value is impossible.
        """
        arrays = _arrays(path)
        try:
            return cls.of_arrays(arrays)
        except ValueError as error:
            raise ValueError(f"--batch {path}: {error}") from None

    @classmethod
    def of_arrays(cls, arrays: Arrays) -> Batch:
        """Make a batch from named arrays. Raises ValueError for the same errors in the arrays as `read`."""
        of_transformers = "input_ids" in arrays
        _check_names(arrays, OF_TRANSFORMERS if of_transformers else OF_MEGATRON)
        if of_transformers:
            arrays = _shifted(arrays)
        tokens, labels = arrays["tokens"], arrays["labels"]
        mask = np.where(labels == IGNORED, 0, arrays.get("loss_mask", np.ones(labels.shape)))
        given = {name: arrays[name] for name in ("position_ids", "document_ids") if name in arrays}
        _check_shapes({"tokens": tokens, "labels": labels, "loss_mask": mask, **given})
        if not mask.any():
            raise ValueError("no label counts; give labels other than -100, or a loss_mask that is not 0 everywhere")
        documents = _documents(arrays, tokens.shape)
        positions = given.get("position_ids")
        if positions is not None and (positions == np.arange(positions.shape[1])).all():
            positions = None
        return cls(
            tokens.astype(np.int64),
            np.where(labels == IGNORED, 0, labels).astype(np.int64),
            mask.astype(np.float32),
            None if positions is None else positions.astype(np.int64),
            documents,
            tables_only=not of_transformers,
        )

    def part(self, samples: slice, tokens: slice) -> Batch:
        """Return a copy of the batch in which only the labels at `tokens` of `samples` count for the loss."""
        mask = np.zeros_like(self.loss_mask)
        mask[samples, tokens] = self.loss_mask[samples, tokens]
        return replace(self, loss_mask=mask)


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays in a file. If `path` is a folder with one file per data-parallel rank, return the concatenated
    arrays of all files."""
    files = sorted(path.glob(SAMPLES)) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"--batch {path} is a folder without {SAMPLES}; give an .npz file or a folder of --dump-step")
    parts = []
    for each in files:
        try:
            loaded = np.load(each, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array without a name")
            with loaded:
                parts.append({name: loaded[name] for name in loaded.files})
        except FileNotFoundError:
            raise ValueError(f"--batch {each} does not exist; write it with numpy.savez") from None
        except (OSError, ValueError, EOFError, BadZipFile) as error:
            raise ValueError(
                f"--batch {each} is not an .npz file of arrays: {error}; write it with numpy.savez"
            ) from None
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _check_names(arrays: Arrays, known: tuple[str, ...]) -> None:
    """Raise ValueError if a required array is missing, or if an array has an unknown name and would therefore be
    ignored."""
    if known is OF_MEGATRON and (missing := {"tokens", "labels"} - arrays.keys()):
        has = f"has no {' and no '.join(sorted(missing))}; it has {', '.join(arrays)}"
        raise ValueError(f"{has}; give tokens and labels, or input_ids")
    if unknown := sorted(arrays.keys() - {*known, *OF_STEPS}):
        form = f"beside {known[0]} it may hold {', '.join(known[1:])}"
        raise ValueError(f"{', '.join(unknown)} would be ignored; {form}; leave it out if the model did not read it")


def _check_shapes(arrays: Arrays) -> None:
    """Raise ValueError unless all arrays have the shape [samples, s] and the arrays of ids contain non-negative
    integers."""
    if arrays["tokens"].ndim != 2 or len({each.shape for each in arrays.values()}) != 1:
        shapes = ", ".join(f"{name} {each.shape}" for name, each in arrays.items())
        raise ValueError(f"all arrays must be [samples, s], but are {shapes}")
    for name, ids in arrays.items():
        if name in ("loss_mask", "attention_mask"):
            continue
        if not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"{name} must hold integers, but has the dtype {ids.dtype}; convert it with .astype(int)")
        if (least := ids[ids != IGNORED].min(initial=0) if name == "labels" else ids.min()) < 0:
            raise ValueError(f"{name} must be at least 0, but has the value {least}")


def _documents(arrays: Arrays, shape: tuple[int, ...]) -> NDArray[np.int64] | None:
    """Return document ids [samples, s], or None if each sample is one document."""
    documents = arrays.get("document_ids")
    starts = arrays.get("cu_seqlens")
    if documents is not None and starts is not None:
        raise ValueError(
            "has document_ids and cu_seqlens, which both state where documents begin; leave one of them out"
        )
    if starts is not None:
        documents = _of_starts(starts, shape)
    if documents is None or (documents == documents[:, :1]).all():
        return None
    for number, ids in enumerate(documents):
        begun = ids[np.flatnonzero(np.diff(ids, prepend=ids[0] - 1))]
        if len(set(begun.tolist())) != len(begun):
            raise ValueError(
                f"document_ids of sample {number} return to an earlier document; its tokens must be adjacent"
            )
    return documents.astype(np.int64)


def _of_starts(starts: NDArray[Any], shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Convert cu_seqlens [n] or [samples, n] to document ids [samples, s]. A row of cu_seqlens may be padded at the end
    with -1 or s."""
    samples, length = shape
    rows = starts[None] if starts.ndim == 1 else starts
    if rows.ndim != 2 or len(rows) != samples:
        raise ValueError(f"cu_seqlens must be [samples, n] with {samples} samples, but is {starts.shape}")
    found = []
    for row in rows:
        bounds = row[(row >= 0) & (row < length)]
        if length not in row or bounds.size == 0 or bounds[0] != 0 or (np.diff(bounds) <= 0).any():
            shown = ", ".join(map(str, row[:8].tolist()))
            raise ValueError(f"cu_seqlens [{shown}] must ascend from 0 to {length}, the tokens of a sample")
        found.append(np.searchsorted(bounds, np.arange(length), side="right") - 1)
    return np.stack(found)


def _shifted(arrays: Arrays) -> dict[str, NDArray[Any]]:
    """Convert a transformers batch to Megatron-LM's form, in which the labels are shifted by one token. Transformers
    models shift the labels inside the model."""
    ids, mask = arrays["input_ids"], arrays.get("attention_mask")
    labels = arrays.get("labels", ids)
    own = {name: arrays[name] for name in ("position_ids", "document_ids") if name in arrays}
    _check_shapes({"tokens": ids, "labels": labels, **({} if mask is None else {"attention_mask": mask}), **own})
    if mask is not None and ((np.diff(mask, axis=1) > 0).any() or (labels[mask == 0] != IGNORED).any()):
        remedy = "pad samples after their text, and give padding the label -100"
        raise ValueError(
            f"attention_mask hides a token before a visible token, or a token whose label counts; {remedy}"
        )
    if "cu_seqlens" in arrays:
        own["document_ids"] = _documents(arrays, ids.shape)  # type: ignore[assignment]
        own = {name: each for name, each in own.items() if each is not None}
    elif "position_ids" in own and "document_ids" not in own and mask is None:
        own["document_ids"] = (
            np.diff(own["position_ids"], axis=1, prepend=own["position_ids"][:, :1] - 1) != 1
        ).cumsum(1)
    return {"tokens": ids[:, :-1], "labels": labels[:, 1:], **{name: each[:, :-1] for name, each in own.items()}}
