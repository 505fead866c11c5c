"""Model class for lm-evaluation-harness that evaluates a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from lm_eval.api.registry import register_model

from megatron.core.batch import Batch
from megatron.core.config.data import TokenizerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.dist_checkpointing.path_kind import PATH_KINDS, kind_of, refusal
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.executor import PipelineExecutor
from megatron.extensions import load
from megatron.extensions.observe.evaluation.continuation import MOST_TOKENS, CachedGeneration
from megatron.extensions.observe.evaluation.harness import ParallelLM
from megatron.extensions.observe.evaluation.scoring import Scorer, lengths_of_batches, scores_by
from megatron.extensions.use.inference.model import LoadedModel, loaded_model
from megatron.training.extensions import ExtensionError, load_extensions
from megatron.training.metrics.progress_bar import bars, no_bar
from megatron.training.reliability.launch import Launch

TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")


class ModelArgumentError(ValueError):
    """Raised if a value of --model_args cannot be used."""


def check_arguments(checkpoint: str | None, fields: Mapping[str, str]) -> None:
    """Raise ModelArgumentError if the checkpoint does not exist, or if `fields` contains names that are not tokenizer
    fields."""
    unknown = [name for name in fields if name not in TOKENIZER]
    known = f"use checkpoint, tp, pp, ep, extension or {TOKENIZER}"
    problems = [f"--model_args {name}: is unknown; {known}" for name in unknown]
    if checkpoint is None or not PATH_KINDS.facts(kind_of(checkpoint)).loaded_as:
        problems.append(f"--model_args checkpoint={refusal(checkpoint or '')}")
    if problems:
        raise ModelArgumentError("\n".join(problems))


def load_named(extension: str) -> None:
    """Load the extension files that `extension` names. Raises ModelArgumentError if an extension cannot be used."""
    try:
        load_extensions([name for name in extension.split(os.pathsep) if name])
    except ExtensionError as error:
        raise ModelArgumentError(f"--model_args extension={extension}: {error}") from None


def check_length(longest: int, limit: int) -> None:
    """Raise ModelArgumentError if a model with `limit` positions cannot read `longest` tokens."""
    if not 1 <= longest <= limit:
        raise ModelArgumentError(
            f"--model_args max_length={longest}: the model has {limit} positions; nearest: {limit}"
        )


@register_model("megatron")
class CheckpointLM(ParallelLM):
    """A checkpoint saved under any layout, loaded into one process or sharded over the ranks that torchrun or srun
    launched.

    `checkpoint` is a folder of checkpoints, a single checkpoint, or the folder of a Hugging Face model. `tp`, `pp` and
    `ep` are the tensor-parallel, pipeline-parallel and expert-parallel sizes. `max_length` is the number of tokens that
    the model reads. The default is --seq-length of the model's run. `batch_tokens` is the number of tokens in a forward
    pass. Tokenizer fields (`tokenizer_type` and so on) replace the tokenizer flags of the run. `batch_size` and
    `max_batch_size`, which the harness passes, are ignored, because batches are measured in tokens. `extension` names
    the Python file of your own extension, or several files separated by colons. Raises ModelArgumentError with every
    problem of these arguments.
    """

    def __init__(
        self,
        checkpoint: str | None = None,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        batch_tokens: int = 8192,
        max_gen_toks: int = MOST_TOKENS,
        extension: str = "",
        batch_size: object = None,
        max_batch_size: object = None,
        **fields: str,
    ) -> None:
        load()
        check_arguments(checkpoint, fields)
        load_named(extension)
        from torch.cuda import is_available

        self.resources = ExitStack()
        layout = ModelParallelConfig(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
        )
        place = (device or ("cuda" if is_available() else "cpu")).partition(":")[0]
        config_of: Callable[..., TokenizerConfig] = TokenizerConfig
        given = config_of(**fields) if fields else None
        loading = loaded_model(str(checkpoint), layout, place, Launch.from_environment(), given)
        try:
            self.loaded: LoadedModel = self.resources.enter_context(loading)
        except ExtensionError as error:
            raise ModelArgumentError(f"{error} (as --model_args extension=FILE)") from None
        except ValueError as error:
            raise ModelArgumentError(str(error)) from error
        longest = max_length or self.loaded.config.model.seq_length
        check_length(longest, self.loaded.config.model.max_positions)
        runner = self.loaded.runner
        state = self.loaded.state
        tokenizer = self.loaded.tokenizer
        executor = PipelineExecutor[GPTModel, Batch](runner.stages, runner.layout, runner.p2p)
        scorer = Scorer(
            forward=scores_by(executor, self.loaded.layout, state),
            lengths=lengths_of_batches(longest, self.loaded.layout),
            budget=batch_tokens,
            state=state,
            device=runner.device,
            progress=bars("scoring", "batch") if state.world.rank == 0 else no_bar,
        )
        generate = CachedGeneration(runner.stages, state, runner.layout, tokenizer, batch_tokens, True)
        super().__init__(tokenizer, scorer, generate, max_gen_toks)

    @property
    def tokenizer_name(self) -> str:
        return str(self.loaded.tokenizer_config.tokenizer_type)
