"""Tests of batch files for the referee: the arrays in an .npz file, and document boundaries within samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.testing.referee.batch import Batch

IDS = np.arange(12).reshape(2, 6)
TOKENS = {"tokens": IDS, "labels": IDS + 1}
DOCUMENTS = [[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 2]]


@pytest.mark.parametrize(
    "documents",
    [
        pytest.param({"document_ids": np.array([[3, 3, 4, 4, 4, 4], [0, 0, 0, 0, 7, 9]])}, id="ids"),
        pytest.param({"cu_seqlens": np.array([[0, 2, 6, 6], [0, 4, 5, 6]])}, id="starts"),
        pytest.param({"cu_seqlens": np.array([[0, 2, 6, -1], [0, 4, 5, 6]])}, id="starts, padded with -1"),
    ],
)
def test_documents_are_read_in_every_format(documents: dict[str, NDArray]) -> None:
    found = Batch.of_arrays(TOKENS | documents).document_ids
    assert found is not None
    assert [[int(id != row[0]) for id in row] for row in found] == [[int(id > 0) for id in row] for row in DOCUMENTS]
    assert (np.diff(found, axis=1) != 0).tolist() == (np.diff(DOCUMENTS, axis=1) != 0).tolist()


def test_one_document_per_sample_needs_no_ids() -> None:
    arrays = {"document_ids": np.full((2, 6), 5), "position_ids": np.tile(np.arange(6), (2, 1))}
    found = Batch.of_arrays(TOKENS | arrays)
    assert found.document_ids is None and found.position_ids is None
    assert Batch.of_arrays(TOKENS | {"cu_seqlens": np.array([[0, 6], [0, 6]])}).document_ids is None


def test_positions_of_transformers_begin_documents_unless_there_is_a_mask() -> None:
    positions = np.array([[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 0, 0]])
    found = Batch.of_arrays({"input_ids": IDS, "position_ids": positions})
    assert found.document_ids is not None and found.position_ids is not None and not found.tables_only
    assert found.document_ids.tolist() == [row[:-1] for row in DOCUMENTS]
    assert found.position_ids.tolist() == positions[:, :-1].tolist()
    masked = Batch.of_arrays({"input_ids": IDS, "position_ids": positions, "attention_mask": np.ones((2, 6), int)})
    assert masked.document_ids is None and masked.position_ids is not None
    of_megatron = Batch.of_arrays(TOKENS | {"position_ids": positions})
    assert of_megatron.document_ids is None and of_megatron.tables_only


def test_padding_after_the_text_is_accepted() -> None:
    labels, mask = IDS.copy(), np.ones((2, 6), int)
    labels[1, 4:], mask[1, 4:] = -100, 0
    found = Batch.of_arrays({"input_ids": IDS, "labels": labels, "attention_mask": mask})
    assert found.loss_mask.tolist() == [[1] * 5, [1, 1, 1, 0, 0]]


OF_TWO = np.zeros((1, 4), np.int64)
PAIR = {"tokens": OF_TWO, "labels": OF_TWO}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"tokens": np.zeros((2, 3))}, "has no labels; it has tokens; give tokens and labels, or input_ids"),
        (
            {"tokens": np.zeros((2, 3)), "labels": np.zeros((2, 4))},
            r"all arrays must be \[samples, s\], but are tokens",
        ),
        ({"input_ids": np.zeros(40, int)}, r"all arrays must be \[samples, s\], but are tokens \(40,\)"),
        ({"input_ids": np.zeros((1, 40), int), "labels": np.full((1, 40), -100)}, "no label counts; give labels"),
        ({"input_ids": np.zeros((1, 40))}, "tokens must hold integers, but has the dtype float64"),
        ({"tokens": OF_TWO - 1, "labels": OF_TWO}, "tokens must be at least 0, but has the value -1"),
        ({**PAIR, "attention_mask": OF_TWO}, "attention_mask would be ignored; beside tokens it may hold labels"),
        ({**PAIR, "position_ids": OF_TWO[:, 1:]}, r"but are tokens .* position_ids \(1, 3\)"),
        ({**PAIR, "document_ids": np.array([[0, 1, 0, 0]])}, "document_ids of sample 0 return to an earlier document"),
        ({**PAIR, "document_ids": OF_TWO, "cu_seqlens": OF_TWO}, "which both state where documents begin"),
        ({**PAIR, "cu_seqlens": np.array([0, 3])}, r"cu_seqlens \[0, 3\] must ascend from 0 to 4"),
        ({**PAIR, "cu_seqlens": np.array([[0, 4], [0, 4]])}, "must be .samples, n. with 1 samples"),
        ({"input_ids": OF_TWO, "attention_mask": np.array([[0, 1, 1, 1]])}, "hides a token before a visible token"),
        ({"input_ids": OF_TWO, "attention_mask": np.array([[1, 1, 1, 0]])}, "or a token whose label counts"),
    ],
)
def test_a_wrong_batch_is_refused(tmp_path: Path, arrays: dict[str, NDArray], message: str) -> None:
    np.savez(tmp_path / "batch.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"--batch .*batch.npz: .*{message}"):
        Batch.read(tmp_path / "batch.npz")


def test_a_file_that_is_not_a_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.npz does not exist; write it with numpy.savez"):
        Batch.read(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(ValueError, match=r"text.npz is not an .npz file of arrays"):
        Batch.read(tmp_path / "text.npz")
    np.save(tmp_path / "one.npy", IDS)
    with pytest.raises(ValueError, match=r"one.npy is not an .npz file of arrays: it holds a single array"):
        Batch.read(tmp_path / "one.npy")
    with pytest.raises(ValueError, match=r"is a folder without samples-\*.npz"):
        Batch.read(tmp_path)
