"""Reader of the gradients that Megatron-LM writes with --save-wgrads-interval. The reader assembles the shards into
complete gradients.

The first rank of each expert-data-parallel group saves one file with the `main_grad` of its parameters, in the form
{`model_chunk0`: {name: tensor}}. The file has the same name as the rank's folder in a checkpoint:

    SAVE/wgrads/iter_XXXXXXX/mp_rank_TT[_PPP][_EEE].pth

The files do not contain the run's arguments, so the parallel sizes are derived from file names and tensor shapes. If
experts are not sharded over TP, files exist only for some combinations of a TP rank and an EP rank, but each TP rank
and each EP rank occurs in at least one file name. If the TP size exceeds the EP size times the expert TP size,
Megatron-LM writes no files for some TP ranks. The dump is then incomplete.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron.core.config.model import TransformerConfig
from megatron.extensions.interop.megatron_checkpoints.common_state import load_common
from megatron.extensions.interop.megatron_checkpoints.legacy_folder import RANK_FOLDER, Layout, LegacyTensors, Rank

CHUNK = "model_chunk"
RANK_FILES = "mp_rank_*.pth"


class GradientFolder(LegacyTensors):
    """Reader of the gradients of a model's parameters from the files of all ranks."""

    def __init__(self, folder: Path, model: TransformerConfig) -> None:
        self.files = {path.stem: path for path in sorted(folder.glob(RANK_FILES))}
        if not self.files:
            raise ValueError(f"{folder} has no {RANK_FILES} of --save-wgrads-interval")
        self.common, self.args = {}, {}
        self.version = 3.0
        try:
            tp, pp, ep = self._sizes()
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
        problem: ValueError | None = None
        for expt_tp in dict.fromkeys((tp, 1)):
            try:
                self._open_ranks(folder, list(self.files), Layout(tp, pp, ep, expt_tp, "the file names"))
                self.find(model)
                return
            except ValueError as error:
                problem = problem or error
        sizes = f"TP {tp}, PP {pp}, EP {ep}, the sizes in the names {', '.join(self.files)}"
        raise ValueError(f"{folder} does not fit the model at {sizes}, or files of other hosts are missing: {problem}")

    def _sizes(self) -> tuple[int, int, int]:
        """Return the (TP, PP, EP) sizes. In a file name with two numbers, the second number is the EP rank or the PP
        rank. If all files contain the same dense parameters, the second number is the EP rank; otherwise, it is the PP
        rank."""
        matches = [RANK_FOLDER.fullmatch(name) for name in self.files]
        ranks = [[int(number) for number in match.groups() if number] for match in matches if match is not None]
        if len(ranks) != len(matches) or len({len(rank) for rank in ranks}) != 1:
            names = ", ".join(path.name for path in self.files.values())
            raise ValueError(f"{names}: the file names are not those of one run's ranks, such as mp_rank_00_001.pth")
        tp, *others = [1 + max(numbers) for numbers in zip(*ranks, strict=True)]
        if len(others) != 1:
            return (tp, others[0], others[1]) if others else (tp, 1, 1)
        held = {path: {name for chunk in _chunks(path).values() for name in chunk} for path in self.files.values()}
        same = len({frozenset(name for name in names if "experts" not in name) for names in held.values()}) == 1
        return (tp, 1, others[0]) if same else (tp, others[0], 1)

    def _file(self, rank: Rank) -> Path:
        return self.files[self.ranks[rank].name]

    def _load(self, rank: Rank) -> Mapping[str, object]:
        chunks = _chunks(self._file(rank))
        return {key.replace(CHUNK, "model"): chunk for key, chunk in chunks.items()}


def _chunks(path: Path) -> dict[str, Mapping[str, object]]:
    """Return the model chunks in the file of one rank. Raises ValueError if the file contains no chunks, or anything
    besides chunks."""
    found = load_common(path)
    if not found or any(not key.startswith(CHUNK) or not isinstance(chunk, Mapping) for key, chunk in found.items()):
        raise ValueError(f"{path} contains no gradients written by --save-wgrads-interval (key {CHUNK}0)")
    return {key: chunk for key, chunk in found.items() if isinstance(chunk, Mapping)}
