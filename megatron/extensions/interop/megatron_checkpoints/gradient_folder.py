"""Gradients that Megatron-LM's --save-wgrads-interval has written, as whole tensors.

Each rank that is the first of its data-parallel group saves `main_grad` of its parameters by name, in one file of a
folder `mp_rank_XX[_YYY][_ZZZ]` as that of its checkpoints: {`model_chunk0`: {name: tensor}}. The file has no arguments,
so the folders' names and the tensors' shapes say the parallel sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron.core.config.model import TransformerConfig
from megatron.extensions.interop.megatron_checkpoints.common_state import load_common
from megatron.extensions.interop.megatron_checkpoints.legacy_folder import RANK_FOLDER, Layout, LegacyTensors, Rank

CHUNK = "model_chunk"


class GradientFolder(LegacyTensors):
    """Gradients of our parameters in the files of all ranks."""

    def __init__(self, folder: Path, model: TransformerConfig) -> None:
        self.files = {path.parent.name: path for path in sorted(folder.glob("mp_rank_*/*.p*t*"))}
        if not self.files:
            raise ValueError(f"{folder} has no mp_rank_XX/FILE.pth of --save-wgrads-interval")
        self.common, self.args = {}, {}
        self.version = 3.0
        tp, pp, ep = self._sizes()
        problem: ValueError | None = None
        for expt_tp in dict.fromkeys((tp, 1)):
            try:
                self._open_ranks(folder, list(self.files), Layout(tp, pp, ep, expt_tp))
                self.find(model)
                return
            except ValueError as error:
                problem = problem or error
        raise ValueError(f"{folder}: {problem}") from None

    def _sizes(self) -> tuple[int, int, int]:
        """(TP, PP, EP) sizes. A second number of a folder is the EP rank if its ranks hold the same names."""
        matches = [RANK_FOLDER.fullmatch(name) for name in self.files]
        ranks = [[int(number) for number in match.groups() if number] for match in matches if match is not None]
        if len(ranks) != len(matches) or len({len(rank) for rank in ranks}) != 1:
            raise ValueError(f"{', '.join(self.files)} are no folders of ranks")
        tp, *others = [1 + max(numbers) for numbers in zip(*ranks, strict=True)]
        if len(others) != 1:
            return (tp, others[0], others[1]) if others else (tp, 1, 1)
        held = {path: {name for chunk in _chunks(path).values() for name in chunk} for path in self.files.values()}
        same = len({frozenset(name for name in names if "experts" not in name) for names in held.values()}) == 1
        return (tp, 1, others[0]) if same else (tp, others[0], 1)

    def _load(self, rank: Rank) -> Mapping[str, object]:
        chunks = _chunks(self.files[self.ranks[rank].name])
        return {key.replace(CHUNK, "model"): chunk for key, chunk in chunks.items()}


def _chunks(path: Path) -> dict[str, Mapping[str, object]]:
    """The chunks of a rank's model. Raises ValueError if a file holds anything else."""
    found = load_common(path)
    if not found or any(not key.startswith(CHUNK) or not isinstance(chunk, Mapping) for key, chunk in found.items()):
        raise ValueError(f"{path} holds no gradients of --save-wgrads-interval ({CHUNK}0)")
    return {key: chunk for key, chunk in found.items() if isinstance(chunk, Mapping)}
