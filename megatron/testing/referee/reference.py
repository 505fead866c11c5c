"""Loss and gradients of a model, computed in one process, either in fp64 or in another number format whose rounding
errors are to be measured.

Weights, gradients and the tensors saved for the backward pass are in files (`on_disk.py`), so memory holds only the
temporary tensors of one layer at a time. The weights are never updated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megatron.core.config.data import DatasetConfig
from megatron.core.config.model import TransformerConfig
from megatron.core.datasets.sample_format import Sample
from megatron.core.datasets.samplers import DataIterator
from megatron.core.distributed.finalize_model_grads import reduce_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import ParallelState
from megatron.extensions.interop.conversion.formats import Source
from megatron.extensions.observe.diagnosis.step_replay import without_callbacks, without_data_flags
from megatron.testing.referee.batch import Batch
from megatron.testing.referee.configuration import check_same_model, in_one_process
from megatron.testing.referee.on_disk import LargeTensorsOnDisk, return_freed_memory, saved_on_disk
from megatron.training.config.run_config import RunConfig, TrainingConfig
from megatron.training.config.validation import resolve_legal
from megatron.training.initialize import Runtime, set_determinism
from megatron.training.reliability.launch import Launch
from megatron.training.run import TrainingRun
from megatron.training.setup import build_run
from megatron.training.train_step import TrainStep


class Gradients:
    """Loss and gradients of a model on a batch. A gradient is copied from the memory of the run only when it is
    read."""

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
        """Return the unsharded gradient of the mean loss with respect to a parameter, in fp64."""
        grad = self._grads[name]
        return (grad * self._factor.to(grad.dtype)).double()


class GivenSamples:
    """Dataset that contains the samples of a batch."""

    fingerprint = "batch"

    def __init__(self, batch: Batch, model: TransformerConfig) -> None:
        self._batch = batch
        restart = model.position_table or not batch.tables_only
        self._positions = batch.position_ids if restart else None

    def __len__(self) -> int:
        return len(self._batch.tokens)

    def __getitem__(self, index: int) -> Sample:
        batch = self._batch
        return {
            "tokens": batch.tokens[index],
            "labels": batch.labels[index],
            "loss_mask": batch.loss_mask[index],
            "position_ids": None if self._positions is None else self._positions[index],
            "document_ids": None if batch.document_ids is None else batch.document_ids[index],
        }

    def origin(self, index: int) -> str:
        return f"sample {index} of the batch"

    def text(self, index: int) -> NDArray[np.int64]:
        return np.append(self._batch.tokens[index], self._batch.labels[index, -1:])


@dataclass(frozen=True)
class Model:
    """Model that computes the reference gradients: its weights and its number format."""

    source: Source
    """An open checkpoint or Hugging Face folder; its weights are read one at a time."""

    number_format: str = "fp64"
    """fp64, fp32, bf16 or fp16."""

    config: RunConfig | None = None
    """Configuration of the source, in which flags have set the values that the source does not define, such as loss
    coefficients. None means the configuration of the source without changes."""

    def gradients(self, batch: Batch, watched: Watched | None = None) -> Gradients:
        """Compute loss and gradients in one process.

        If `watched` is given, its parameter gets a partial gradient, and the gradients of all other parameters are
        meaningless. Raises ValueError with every problem if the flags do not fit the model, or the model does not fit
        the batch.
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
            run.data.train = DataIterator(GivenSamples(batch, config.model), micro_batch_size=1, name="batch")
            hooks.enter_context(saved_on_disk())
            return Gradients(run)

    def _config(self, batch: Batch) -> RunConfig:
        """Return the configuration for one step in one process, without dropout."""
        own, (samples, length) = (
            without_callbacks(without_data_flags(self.config or self.source.config)),
            batch.tokens.shape,
        )
        _check_fits(batch, own.model)
        model = replace(own.model, seq_length=length, attention_dropout=0.0, hidden_dropout=0.0)
        config = replace(
            in_one_process(own, **{self.number_format: True}),
            model=model,
            training=TrainingConfig(micro_batch_size=1, global_batch_size=samples, train_iters=1, eval_iters=0),
            data=DatasetConfig(mock_data=True, num_workers=0),
        )
        check_same_model(self.source, config)
        return resolve_legal(config, 1)


def _check_fits(batch: Batch, model: TransformerConfig) -> None:
    """Raise ValueError if a batch has token ids or positions that are out of range for the model."""
    tokens, longest = model.vocab_size, model.max_position_embeddings
    for name, ids in (("tokens", batch.tokens), ("labels", batch.labels)):
        if tokens is not None and ids.max() >= tokens:
            rule = f"{name} has the token {ids.max()}, but the vocabulary of --model has {tokens} tokens"
            raise ValueError(f"--batch: {rule}; tokenize with the model's tokenizer")
    last = batch.tokens.shape[1] - 1 if batch.position_ids is None else int(batch.position_ids.max())
    if longest is not None and last >= longest:
        rule = f"a sample has position {last}, but --model supports only {longest} positions (max_position_embeddings)"
        raise ValueError(f"--batch: {rule}; give shorter samples")


@dataclass(frozen=True)
class Watched:
    """A parameter for which a partial gradient is computed: the sum over only a block of the sequence positions in its
    module's output.

    A sequence-parallel or context-parallel rank holds exactly this partial gradient before the gradients of all ranks
    are summed.
    """

    name: str
    places: tuple[int, int]
    """Pair (index of the block, number of blocks). The positions of the sequence are divided into this number of
    blocks."""

    def attach(self, run: TrainingRun, hooks: ExitStack) -> None:
        for model in run.stages.values():
            param = next(param for param, meta in model.named_metas().values() if meta.name == self.name)
            for module in model.modules():
                if any(each is param for each in module.parameters(recurse=False)):
                    self._hook(module, hooks)

    def _hook(self, module: nn.Module, hooks: ExitStack) -> None:
        hooks.callback(module.register_forward_hook(lambda module, args, output: self._mask(output)).remove)

    def _mask(self, given: object) -> None:
        tensors = given if isinstance(given, tuple) else (given,)
        for each in tensors:
            if isinstance(each, Tensor) and each.requires_grad and each.dim() > 1:
                each.register_hook(self._masked)

    def _masked(self, grad: Tensor) -> Tensor:
        """grad [s, ...]"""
        return _block_of(grad, 0, *self.places)


class WatchedInputs(Watched):
    """A linear layer whose input gradient is kept for only some features, such as those of a few heads.

    A tensor-parallel rank has only its own part of the input gradient, and computes gradients of earlier parameters
    from this part. The sum of these gradients over the ranks is the correct gradient. `name` is the name of the linear
    layer's weight.
    """

    def _hook(self, module: nn.Module, hooks: ExitStack) -> None:
        hooks.callback(module.register_forward_pre_hook(lambda module, args: self._mask(args[:1])).remove)

    def _masked(self, grad: Tensor) -> Tensor:
        """grad [..., features]"""
        return _block_of(grad, grad.dim() - 1, *self.places)


def _block_of(grad: Tensor, dim: int, block: int, count: int) -> Tensor:
    """Divide the dimension `dim` of a gradient into `count` blocks, and return the gradient with zeros outside the
    block with index `block`."""
    size = grad.shape[dim]
    kept = torch.zeros_like(grad)
    start, end = size * block // count, size * (block + 1) // count
    kept.narrow(dim, start, end - start).copy_(grad.narrow(dim, start, end - start))
    return kept


def _load(run: TrainingRun, source: Source) -> None:
    """Load the weights and the untrained states, such as router biases, from a source."""
    for model in run.stages.values():
        for param, meta in model.named_metas().values():
            if param.requires_grad:
                param.data.copy_(source.read(meta.name, torch.float64))
            elif meta.name in source.states:
                param.data.copy_(source.read_state(meta, torch.float64))
