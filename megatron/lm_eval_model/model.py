"""The class that lm-evaluation-harness calls. It gives every rank all requests, which the ranks score together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from megatron.core.config.data import TokenizerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.dist_checkpointing.path_kind import PATH_KINDS, kind_of, refusal
from megatron.core.pipeline_parallel.executor import PipelineExecutor
from megatron.extensions.evaluation.in_loop import CachedGeneration
from megatron.extensions.evaluation.rows import Row, continuation_row, rolling_rows
from megatron.extensions.evaluation.scoring import Scorer, greedy_request, lengths_of_batches, scores_by
from megatron.extensions.evaluation.suite import scores_by_row, together
from megatron.extensions.evaluation.task_file import asks_for_sampling
from megatron.extensions.inference.model import LoadedModel, loaded_model
from megatron.training.reliability.launch import Launch

T = TypeVar("T")

TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")


@register_model("megatron")
class CheckpointLM(LM):
    """A checkpoint, saved at any layout, over the ranks that torchrun or srun started, or in one process.

    `checkpoint` is a folder of checkpoints, one of them, or the folder of a Hugging Face model. `tp`, `pp` and `ep` cut
    the model over the ranks. `max_length` is the number of tokens that the model reads, by default --seq-length of its
    run; `batch_tokens` those of a forward pass. The tokenizer's fields (`tokenizer_type` and so on) replace those of
    the run. `batch_size` and `max_batch_size`, which the harness passes, have no meaning for batches that are counted
    in tokens.
    Raises ValueError with what is wrong with them.
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
        max_gen_toks: int = 256,
        batch_size: Any = None,
        max_batch_size: Any = None,
        **fields: Any,
    ) -> None:
        super().__init__()
        unknown = [name for name in fields if name not in TOKENIZER]
        problems = [f"--model_args {name}: is unknown; use checkpoint, tp, pp, ep or {TOKENIZER}" for name in unknown]
        if checkpoint is None or not PATH_KINDS.facts(kind_of(checkpoint)).loaded_as:
            problems.append(f"--model_args checkpoint={refusal(checkpoint or '')}")
        if problems:
            raise ValueError("\n".join(problems))
        from torch.cuda import is_available

        self.resources = ExitStack()
        layout = ModelParallelConfig(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
        )
        place = (device or ("cuda" if is_available() else "cpu")).partition(":")[0]
        given = TokenizerConfig(**fields) if fields else None
        loading = loaded_model(str(checkpoint), layout, place, Launch.from_environment(), given)
        self.loaded: LoadedModel = self.resources.enter_context(loading)
        longest = max_length or self.loaded.config.model.seq_length
        limit = self.loaded.config.model.max_positions
        if not 1 <= longest <= limit:
            raise ValueError(f"--model_args max_length={longest}: the model has {limit} positions; nearest: {limit}")
        runner, state, tokenizer = self.loaded.runner, self.loaded.state, self.loaded.tokenizer
        executor = PipelineExecutor(runner.stages, runner.layout, runner.p2p)
        self.scorer = Scorer(
            forward=scores_by(executor, self.loaded.layout, state),
            lengths=lengths_of_batches(longest, self.loaded.layout),
            budget=batch_tokens,
            state=state,
            device=runner.device,
        )
        self.max_gen_toks = max_gen_toks
        self.generation = CachedGeneration(runner.stages, state, runner.layout, tokenizer, batch_tokens, True)

    @property
    def tokenizer_name(self) -> str:
        return str(self.loaded.tokenizer_config.tokenizer_type)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-likelihood, whether it is greedy) of each continuation."""
        tokenizer, longest = self.loaded.tokenizer, self.scorer.longest
        rows = [[continuation_row(tokenizer, each.args[0], each.args[1], longest)[0]] for each in requests]
        return self._cached("loglikelihood", requests, self._scores(rows))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each text."""
        texts = [list(rolling_rows(self.loaded.tokenizer, each.args[0], self.scorer.longest)) for each in requests]
        return self._cached("loglikelihood_rolling", requests, [log for log, _ in self._scores(texts)])

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The most likely continuation of each context. Raises ValueError if generation_kwargs ask for sampling."""
        tokenizer, longest, asked = self.loaded.tokenizer, self.scorer.longest, []
        for each in requests:
            context, options = each.args[0], dict(each.args[1])
            if asks_for_sampling(options):
                raise ValueError("generation_kwargs ask for sampling, and decoding is greedy: remove do_sample")
            asked.append(greedy_request(tokenizer, context, options, "", longest, self.max_gen_toks)[0])
        return self._cached("generate_until", requests, self.generation(asked))

    def _scores(self, texts: Sequence[Sequence[Row]]) -> list[tuple[float, bool]]:
        found = scores_by_row(self.scorer, (row for rows in texts for row in rows))
        return [together(found, rows) for rows in texts]

    def _cached(self, kind: str, requests: Sequence[Any], results: list[T]) -> list[T]:
        """The results, which the harness may keep."""
        for each, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial(kind, each.args, result)
        return results
