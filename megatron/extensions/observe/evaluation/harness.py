"""Adapter between lm-evaluation-harness and a model that is distributed over ranks. The adapter consists of the model
class and the tasks.

https://github.com/EleutherAI/lm-evaluation-harness; `pip install .[lm-eval]`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict, TypeVar

import lm_eval.api.metrics
import lm_eval.api.task
import tqdm
from datasets import disable_progress_bars
from lm_eval import evaluator
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from megatron.core.tokenizers import Tokenizer
from megatron.extensions.observe.evaluation.continuation import MOST_TOKENS, GenerationOptions, greedy_request
from megatron.extensions.observe.evaluation.flags import is_file
from megatron.extensions.observe.evaluation.rows import Row, Score, continuation_row, rolling_rows
from megatron.extensions.observe.evaluation.scoring import Scorer
from megatron.extensions.use.inference.generation import Request
from megatron.training.config.yaml_text import compose_yaml
from megatron.training.foreign import replaced

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.instance import Instance
    from lm_eval.api.task import Task
    from lm_eval.tasks.manager import TaskDict

T = TypeVar("T")

ContinueRequests = Callable[[Sequence[Request]], list[str]]


def asks_for_sampling(options: GenerationOptions) -> bool:
    return bool(options.get("do_sample")) and float(options.get("temperature", 1)) > 0


def scored_rows(request: Instance, tokenizer: Tokenizer, longest: int) -> tuple[list[Row], int]:
    """Return the token rows of a log-likelihood request, and the number of tokens that were truncated on the left.

    A `loglikelihood_rolling` request may have several rows. Raises ValueError if the request cannot be scored.
    """
    if request.request_type == "loglikelihood_rolling":
        return list(rolling_rows(tokenizer, request.args[0], longest)), 0
    context, continuation = request.args
    row, cut = continuation_row(tokenizer, context, continuation, longest)
    return [row], cut


def generation(request: Instance, tokenizer: Tokenizer, longest: int, most_tokens: int) -> tuple[Request, int]:
    """Convert a request of the harness to a greedy continuation request. Return the converted request, and the number
    of tokens that were truncated at the beginning of its context.

    Args:
        request: Request of the harness.
        tokenizer: Tokenizer of the model.
        longest: Number of tokens that the model can read.
        most_tokens: Default of max_gen_toks.

    Raises:
        ValueError: The request asks for sampling, or `max_gen_toks` leaves no room for a prompt within the context
        length of the model.
    """
    context, options = request.args
    if asks_for_sampling(options):
        raise ValueError("generation_kwargs request sampling, but decoding is greedy: remove do_sample")
    return greedy_request(tokenizer, context, options, longest, most_tokens)


class ParallelLM(LM):
    """Implementation of the harness's `LM` class for a model that is distributed over ranks. Every rank receives all
    requests, and the ranks score them together."""

    def __init__(
        self, tokenizer: Tokenizer, scorer: Scorer, generate: ContinueRequests, max_gen_toks: int = MOST_TOKENS
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.scorer = scorer
        self.generate = generate
        self.max_gen_toks = max_gen_toks

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return, for each request, the log-likelihood of the continuation, and whether greedy decoding would produce
        it."""
        return self._cached(requests, self._scores(requests))

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text."""
        return self._cached(requests, [log for log, _ in self._scores(requests)])

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the greedy continuation of each context. Raises ValueError if generation_kwargs request sampling."""
        longest, most = self.scorer.longest, self.max_gen_toks
        asked = [generation(request, self.tokenizer, longest, most)[0] for request in requests]
        return self._cached(requests, self.generate(asked))

    def _scores(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Return, for each request, the summed log-likelihood, and whether all scored tokens are the most likely ones.
        The model processes identical rows only once."""
        texts = [scored_rows(request, self.tokenizer, self.scorer.longest)[0] for request in requests]
        different = list(dict.fromkeys(row for rows in texts for row in rows))
        found: dict[Row, Score] = dict(zip(different, self.scorer(different) if different else (), strict=True))
        scores = [[found[row] for row in rows] for rows in texts]
        return [(sum(each.log_likelihood for each in rows), all(each.is_greedy for each in rows)) for rows in scores]

    def _cached(self, requests: Sequence[Instance], results: list[T]) -> list[T]:
        """Pass each result to the harness's cache hook, and return the results."""
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial(request.request_type, request.args, result)
        return results


SEED = 1234
"""Seed for the choice of few-shot examples, equal to the harness's default."""

BOOTSTRAPS = 1000
"""Number of bootstrap samples for the standard error of metrics without a formula, such as perplexity."""


class Results(TypedDict):
    """Part of the harness's results that this module reads."""

    results: Mapping[str, Mapping[str, float | str]]
    """Maps a task to its metric values. The key of a metric includes the name of its filter."""

    groups: NotRequired[Mapping[str, Mapping[str, float | str]]]
    """Maps a task group to its metric values, in the same format as `results`."""

    samples: Mapping[str, Sequence[Mapping[str, object]]]
    """Maps a task to the results of its documents."""


@dataclass(frozen=True)
class Suite:
    """Evaluation tasks and task groups of a run, which are the same on every rank."""

    tasks: dict[str, Task]
    groups: dict[str, Group]
    limit: int | None
    notes: tuple[str, ...]
    """Notices about truncated requests, one per task."""

    @classmethod
    def load(
        cls,
        names: Sequence[str],
        tokenizer: Tokenizer,
        longest: int,
        limit: int | None = None,
        num_fewshot: int | None = None,
    ) -> Suite:
        """Read the tasks and check that their requests can be built.

        Args:
            names: Task files, folders of task files, or names of the harness's built-in tasks.
            tokenizer: Tokenizer of the model.
            longest: Number of tokens that the model can read.
            limit: Number of documents per task; None means all.
            num_fewshot: Number of few-shot examples; None keeps the number in each task file.

        Raises:
            ValueError: A task cannot be loaded, or one of its requests cannot be built. The message lists all problems,
            one per line.
        """
        os.environ.setdefault("DISABLE_MULTIPROC", "1")  # otherwise, lm-eval's bootstrapping forks this process
        disable_progress_bars()
        suite = cls({}, {}, limit, ())
        problems = list[str]()
        notes = list[str]()
        paths = [Path(name) for name in names if is_file(name)]
        folders = list(dict.fromkeys(path if path.is_dir() else path.parent for path in paths))
        manager = TaskManager(include_path=folders, include_defaults=len(paths) < len(names))
        for name in names:
            for each in sorted(Path(name).rglob("*.yaml")) if Path(name).is_dir() else [Path(name)]:
                try:
                    keys = _keys(each) if is_file(name) else {}
                    if not Path(name).is_dir() or (not each.name.startswith("_") and keys.keys() & {"group", "task"}):
                        suite._add(manager.load([keys.get("group", str(each))]))
                except Exception as error:  # the harness, the data, or the functions of a task may raise any exception
                    problems.append(f"--eval-tasks {each}: {type(error).__name__}: {error}")
        for task in suite.tasks.values():
            if num_fewshot is not None and task.get_config("num_fewshot") != 0:
                task.set_config("num_fewshot", num_fewshot)
            try:
                cut = suite._cut(task, tokenizer, longest)
            except Exception as error:  # the functions of a task may raise any exception
                problems.append(f"--eval-tasks: task {task.task_name}: {type(error).__name__}: {error}")
                continue
            if cut:
                about = f"{cut} of {len(task.instances)} requests are too long and are truncated on the left"
                notes.append(f"task {task.task_name}: {about}")
        if problems:
            raise ValueError("\n".join(problems))
        return cls(suite.tasks, suite.groups, limit, tuple(notes))

    def _add(self, loaded: TaskDict) -> None:
        """Add tasks and task groups. A task may be added twice if it belongs to a group."""
        groups = loaded.get("groups", {})
        for name in () if groups else loaded["tasks"].keys() & self.tasks.keys():
            if not any(name in group.child_names for group in self.groups.values()):
                raise ValueError(f"there are two tasks named {name!r}; rename one of them")
        self.tasks.update(loaded["tasks"])
        self.groups.update(groups)

    def _cut(self, task: Task, tokenizer: Tokenizer, longest: int) -> int:
        """Build the requests of a task, and return how many of them are truncated. Raises an error if a request cannot
        be built or is invalid."""
        task.set_fewshot_seed(SEED)
        with _quietly():
            task.build_all_requests(limit=self.limit, rank=0, world_size=1)
        cut = 0
        for request in task.instances:
            if request.request_type == "generate_until":
                cut += generation(request, tokenizer, longest, MOST_TOKENS)[1] > 0
            else:
                cut += scored_rows(request, tokenizer, longest)[1] > 0
        return cut

    def evaluate(self, model: ParallelLM) -> Results:
        """Run the harness, and return its "results" and the "samples" of each document. The state of random number
        generators does not change. Collective.
        """
        for task in self.tasks.values():
            task.set_fewshot_seed(SEED)
        loaded = {"tasks": self.tasks, "groups": self.groups}
        with _quietly():
            found: Results = evaluator.evaluate(model, loaded, limit=self.limit, bootstrap_iters=BOOTSTRAPS)
            return found


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress the harness's progress output. Output of other threads is still shown."""
    no_bar = partial(tqdm.tqdm, disable=True)
    bars = ((module, "tqdm", no_bar) for module in (tqdm, lm_eval.api.task))
    with replaced(*bars, (lm_eval.api.metrics, "print", lambda *values, **options: None)):
        yield


def _keys(path: Path) -> dict[str, object]:
    """Return the top-level keys of a task file and their values. The file is only parsed: files that it includes are
    not read, and functions that it names are not called."""
    node = compose_yaml(path.read_text(encoding="utf-8"), any_tag=True)
    return {key.value: value.value for key, value in node.value} if node is not None and node.id == "mapping" else {}


def record_of(results: Results) -> dict[str, float]:
    """Return metric values and standard errors by record name. A record name is eval/TASK/METRIC, followed by the name
    of the filter if there is one."""
    record = {}
    for task, values in {**results["results"], **results.get("groups", {})}.items():
        for key, value in values.items():
            metric, comma, filter_name = key.partition(",")
            if comma and not isinstance(value, str):
                end = f",{filter_name}" if filter_name != "none" else ""
                record[f"eval/{task}/{metric}{end}"] = float(value)
    return record
