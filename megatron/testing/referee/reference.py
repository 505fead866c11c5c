"""Computes loss and gradients of a model in one process: in fp64, or in another number format to measure its rounding.

Weights, gradients and the tensors that layers keep for the backward pass are in files (`on_disk.py`), so memory holds
only the temporary tensors of one layer at a time. The optimizer makes no update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.datasets.sample_format import Sample
from megatron.core.datasets.samplers import DataIterator
from megatron.core.distributed.finalize_model_grads import reduce_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import ParallelState
from megatron.extensions.interop.conversion.formats import Source
from megatron.extensions.observe.diagnosis.step_dump import SAMPLES
from megatron.extensions.observe.diagnosis.step_replay import without_callbacks, without_data_flags
from megatron.testing.referee.on_disk import LargeTensorsOnDisk, return_freed_memory, saved_on_disk
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import CheckpointConfig, LoggingConfig, RunConfig, TrainingConfig
from megatron.training.config.validation import resolve_legal
from megatron.training.initialize import Runtime, set_determinism
from megatron.training.reliability.launch import Launch
from megatron.training.run import TrainingRun
from megatron.training.setup import build_run
from megatron.training.train_step import TrainStep

IGNORED = -100
"""Label of uncounted tokens in transformers batches."""


@dataclass(frozen=True)
class Batch:
    """Samples of one step. All arrays are [samples, s]."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    """The token that follows each token."""

    loss_mask: NDArray[np.float32]
    """1 for labels that count."""

    @classmethod
    def read(cls, path: Path) -> Batch:
        """Read a batch from an `.npz` file or from the folder of a saved step.

        An `.npz` file holds `tokens`, `labels` and optionally `loss_mask`, as Megatron-LM feeds a model. Or it holds
        `input_ids` and optionally `labels`, as transformers does: label i is token i, and -100 does not count. Raises
        ValueError if the file holds neither, if the array shapes differ, or if positions or documents begin within a
        sample, which no reference is computed for.
        """
        arrays = _arrays(path)
        _refuse_documents(path, arrays)
        if "input_ids" in arrays:
            arrays = _shifted(arrays["input_ids"], arrays.get("labels"))
        if missing := {"tokens", "labels"} - arrays.keys():
            raise ValueError(f"--batch {path} has no {' and no '.join(sorted(missing))}; it has {', '.join(arrays)}")
        tokens, labels = arrays["tokens"], arrays["labels"]
        mask = arrays.get("loss_mask", np.ones(labels.shape))
        mask = np.where(labels == IGNORED, 0, mask)
        if tokens.ndim != 2 or not tokens.shape == labels.shape == mask.shape:
            shapes = f"tokens {tokens.shape}, labels {labels.shape}, loss_mask {mask.shape}"
            raise ValueError(f"--batch {path}: all must be [samples, s]; they are {shapes}")
        if not mask.any():
            raise ValueError(f"--batch {path}: no label counts")
        labels = np.where(labels == IGNORED, 0, labels)
        return cls(tokens.astype(np.int64), labels.astype(np.int64), mask.astype(np.float32))

    def part(self, samples: slice, tokens: slice) -> Batch:
        """Return the same samples with only some labels counted."""
        mask = np.zeros_like(self.loss_mask)
        mask[samples, tokens] = self.loss_mask[samples, tokens]
        return replace(self, loss_mask=mask)


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of a file, or the concatenated files of all data-parallel ranks in a folder."""
    files = sorted(path.glob(SAMPLES)) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"--batch {path} holds no samples: {SAMPLES}")
    parts = []
    for each in files:
        try:
            with np.load(each, allow_pickle=False) as file:
                parts.append({name: file[name] for name in file.files})
        except (OSError, ValueError) as error:
            raise ValueError(f"--batch {each} is no .npz of arrays: {error}") from None
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _refuse_documents(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Raise ValueError if a sample has positions other than 0, 1, 2, ..., or more than one document."""
    positions, documents = arrays.get("position_ids"), arrays.get("document_ids")
    begin = positions is not None and not (positions == np.arange(positions.shape[-1])).all()
    several = documents is not None and not (documents == documents[..., :1]).all()
    if begin or several:
        name = "position_ids" if begin else "document_ids"
        remedy = "give samples of one document, from a run without --reset-position-ids and --reset-attention-mask"
        raise ValueError(f"--batch {path}: {name} begin again within a sample, which cannot be judged; {remedy}")


def _shifted(ids: NDArray[np.int64], labels: NDArray[np.int64] | None) -> dict[str, NDArray[np.int64]]:
    """Shift a transformers batch to Megatron-LM's form; transformers models shift the labels themselves."""
    labels = ids if labels is None else labels
    return {"tokens": ids[:, :-1], "labels": labels[:, 1:]}


class Gradients:
    """Loss and gradients that a model computed from a batch. Each gradient is read from the run's memory on demand."""

    loss: float
    """Mean loss over the counted tokens, in nats."""

    def __init__(self, run: TrainingRun) -> None:
        """Run the forward and backward passes of the first step of `run`."""
        step = run.step
        assert isinstance(step, TrainStep)
        step.sums = sums = step.gradients(step.inputs(run.progress.next_step(run.batch_sizes)))
        self._factor = reduce_model_grads(run.ddp, sums.total_tokens, run.runtime.state, sums.seed)
        for meter in run.meters:
            meter.gradients_ready(self._factor)
        total, tokens = sums.loss_and_tokens.tolist()
        self.loss = total / tokens
        model: GPTModel
        (model,) = run.stages.values()
        grads = {param.meta.name: param.main_grad for param in run.ddp.params}  # type: ignore[attr-defined]
        self._grads = {name: grads[name] for name in reversed(model.named_metas()) if name in grads}

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of parameters in backward order."""
        return iter(self._grads)

    def __getitem__(self, name: str) -> Tensor:
        """Return the gradient of the mean loss with respect to a parameter, whole, in fp64."""
        grad = self._grads[name]
        return (grad * self._factor.to(grad.dtype)).double()


class GivenSamples:
    """Dataset of a batch's samples."""

    fingerprint = "batch"

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return len(self._batch.tokens)

    def __getitem__(self, index: int) -> Sample:
        batch = self._batch
        return {
            "tokens": batch.tokens[index],
            "labels": batch.labels[index],
            "loss_mask": batch.loss_mask[index],
            "position_ids": None,
            "document_ids": None,
        }

    def origin(self, index: int) -> str:
        return f"sample {index} of the batch"

    def text(self, index: int) -> NDArray[np.int64]:
        return np.append(self._batch.tokens[index], self._batch.labels[index, -1:])


@dataclass(frozen=True)
class Model:
    """A model, its weights and its number format."""

    source: Source
    """An open checkpoint or Hugging Face folder; its weights are read one at a time."""

    number_format: str = "fp64"
    """fp64, fp32, bf16 or fp16."""

    flags: tuple[str, ...] = ()
    """Flags of pretrain_gpt.py for settings that the model's configuration leaves open, such as loss coefficients."""

    def gradients(self, batch: Batch, watched: Watched | None = None) -> Gradients:
        """Compute loss and gradients in one process.

        With `watched`, only its parameter's gradient is meaningful: it is summed over a part of the sequence. Raises
        ValueError with every problem if the flags do not fit the model, or the model does not fit the batch.
        """
        config = self._config(batch)
        set_determinism(config)
        return_freed_memory()
        with LargeTensorsOnDisk():
            run = build_run(config, Runtime(Launch(), torch.device("cpu"), ParallelState()))
        with closing(run.data), ExitStack() as hooks:
            _load(run, self.source)
            if watched is not None:
                watched.attach(run, hooks)
            run.data.train = DataIterator(GivenSamples(batch), micro_batch_size=1, name="batch")
            hooks.enter_context(saved_on_disk())
            return Gradients(run)

    def _config(self, batch: Batch) -> RunConfig:
        """Return the configuration of one step in one process without dropout."""
        own, (samples, length) = without_callbacks(without_data_flags(self.source.config)), batch.tokens.shape
        model = own.model
        if model.max_position_embeddings is not None and length > model.max_position_embeddings:
            raise ValueError(f"--batch: {length} tokens a sample; the model takes {model.max_position_embeddings}")
        model = replace(model, seq_length=length, attention_dropout=0.0, hidden_dropout=0.0)
        given = parse_args(["--mock-data", "--lr", "1e-3", *self.flags])
        config = replace(
            own,
            model=model,
            parallel=ModelParallelConfig(cpu=True, **{self.number_format: True}),  # type: ignore[arg-type]
            training=TrainingConfig(micro_batch_size=1, global_batch_size=samples, train_iters=1, eval_iters=0),
            data=given.data,
            optimizer=replace(own.optimizer, lr=given.optimizer.lr, min_lr=0.0),
            checkpoint=CheckpointConfig(),
            logging=LoggingConfig(),
        )
        return resolve_legal(config, 1)


@dataclass(frozen=True)
class Watched:
    """A parameter whose gradient is summed over only some sequence positions of its module's output.

    A rank of sequence or context parallelism computes such a sum before it is added to the other ranks' sums.
    """

    name: str
    places: tuple[int, int]
    """The block, and the number of blocks."""

    def attach(self, run: TrainingRun, hooks: ExitStack) -> None:
        for model in run.stages.values():
            param = next(param for param, meta in model.named_metas().values() if meta.name == self.name)
            for module in model.modules():
                if any(each is param for each in module.parameters(recurse=False)):
                    hooks.callback(module.register_forward_hook(self._mask).remove)

    def _mask(self, module: nn.Module, args: object, output: object) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        for each in outputs:
            if isinstance(each, Tensor) and each.requires_grad and each.dim() > 1:
                each.register_hook(self._masked)

    def _masked(self, grad: Tensor) -> Tensor:
        """grad [s, ...]"""
        block, count = self.places
        kept = torch.zeros(len(grad), dtype=grad.dtype)
        kept[len(grad) * block // count : len(grad) * (block + 1) // count] = 1
        return grad * kept.view(-1, *[1] * (grad.dim() - 1))


def _load(run: TrainingRun, source: Source) -> None:
    """Load the weights of a source, and the states without gradients."""
    for model in run.stages.values():
        for param, meta in model.named_metas().values():
            if param.requires_grad:
                param.data.copy_(source.read(meta.name, torch.float64))
            elif meta.name in source.states:
                param.data.copy_(source.read_state(meta, torch.float64))
