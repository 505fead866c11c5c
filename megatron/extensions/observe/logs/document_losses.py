"""Log of the evaluation loss of each document (--document-loss-log).

For each document of an evaluation, the file contains one line with a JSON object. The lines of an evaluation are sorted
by decreasing loss:

    {"iteration": 100, "split": "valid", "set": "", "source": "a_text_document", "document": 412, "tokens": 96,
     "loss": 3.71}

`set` is the name of a validation set (--valid NAME=PREFIX), and `source` is the dataset in a blend. `document` is the
document number, as in tools/inspect_dataset.py --document, or null if the dataset has no document numbers. `tokens` is
the number of tokens with a loss mask above 0, and `loss` is the mean loss of these tokens. The loss of a token belongs
to the document that contains the token, even if the token is the first one of the document and is predicted from the
end of the previous document.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron.core.batch import Batch
from megatron.core.collectives import gather_objects
from megatron.core.datasets.sample_order import documents_of
from megatron.extensions.observe.logs.flags import LogsConfig
from megatron.training.hooks import Callback, Evaluation, Meter
from megatron.training.metrics.sinks import JsonLinesSink
from megatron.training.run import TrainingRun

Document = tuple[str, int | None]
"""Name of a source dataset, and number of a document in this dataset."""


class DocumentLosses(Callback, Meter):
    """Callback that collects evaluation losses by document on one rank. Each rank of the last pipeline stage adds the
    losses of its own samples and positions. In each tensor-parallel group, only the first rank adds losses.
    """

    def meters(self, run: TrainingRun) -> Sequence[Meter]:
        self.run, self.evaluation = run, None
        if run.runtime.state.tp.first:
            for model in run.stages.values():
                model.loss_watchers.append(self._add)
        self._sink: JsonLinesSink | None = None
        if run.runtime.is_main:
            path = Path(str(self.config.options(LogsConfig).document_loss_log))
            self._sink = JsonLinesSink(path, run.progress.iteration)
        return (self,)

    evaluation: Evaluation | None
    """Evaluation that is in progress; None between evaluations."""

    def _add(self, losses: Tensor, batch: Batch) -> None:
        """Add losses [s/cp, b] to the sums of the documents that contain the predicted tokens. This method waits for
        the device."""
        if self.evaluation is None:
            return
        mask = batch.loss_mask.double()
        sums, counts = ((each * mask).cpu().numpy() for each in (losses.t().double(), torch.ones_like(mask)))
        places = np.arange(mask.shape[1]) if batch.places is None else batch.places.cpu().numpy()
        dataset = self.evaluation.dataset
        for row, sample in enumerate(batch.sample_index.tolist()):
            if not counts[row].any():
                continue
            source, parts = dataset.origin(sample).rpartition(":")[0], documents_of(dataset, sample)
            ends = list(accumulate(count for _, _, count in parts))
            of_places = np.searchsorted(ends, places + 1, side="right") if parts else np.zeros_like(places)
            numbers: list[int | None] = [number for number, _, _ in parts]
            numbers = numbers or [None]
            for values, at in ((sums[row], 0), (counts[row], 1)):
                for part, value in enumerate(np.bincount(of_places, values, len(numbers))[: len(numbers)]):
                    self.found[source, numbers[part]][at] += float(value)

    @contextmanager
    def evaluating(self, evaluation: Evaluation) -> Iterator[None]:
        """Collect the losses of an evaluation during the `with` block, and write them at the end of the block. The end
        of the block is a collective over the world, unless an exception ends the block."""
        self.evaluation, self.found = evaluation, defaultdict[Document, list[float]](lambda: [0.0, 0.0])
        try:
            yield
        finally:
            self.evaluation = None
        merged = defaultdict[Document, list[float]](lambda: [0.0, 0.0])
        for part in gather_objects(dict(self.found), self.run.runtime.state.world):
            for document, (loss, tokens) in part.items():
                merged[document][0] += loss
                merged[document][1] += tokens
        if self._sink is not None and not self.run.runtime.watchdog.requests.stopping:
            self._write(evaluation, {key: (loss / n, int(n)) for key, (loss, n) in merged.items() if n})

    def _write(self, evaluation: Evaluation, means: dict[Document, tuple[float, int]]) -> None:
        assert self._sink is not None
        for (source, document), (loss, tokens) in sorted(
            means.items(), key=lambda item: (-item[1][0], item[0][0], item[0][1] or 0)
        ):
            self._sink.write(
                {
                    "iteration": self.run.progress.iteration,
                    "split": evaluation.split,
                    "set": evaluation.name,
                    "source": source,
                    "document": document,
                    "tokens": tokens,
                    "loss": loss,
                }
            )

    def on_end(self, run: object) -> None:
        if self._sink is not None:
            self._sink.close()
