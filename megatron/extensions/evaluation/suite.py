"""Tasks made ready for a tokenizer, and their scores from what a model says of their rows and prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from megatron.core.tokenizers import Tokenizer
from megatron.extensions.evaluation.metrics import (
    AGGREGATIONS,
    choice_scores,
    mean_of_tasks,
    rolling_scores,
    standard_error,
    text_scores,
)
from megatron.extensions.evaluation.prompts import Sample, build_samples, generated_scores, where
from megatron.extensions.evaluation.rows import Row, Score, continuation_row, rolling_rows
from megatron.extensions.evaluation.scoring import greedy_request
from megatron.extensions.evaluation.task_file import Group, Task, read_tasks
from megatron.extensions.inference.generation import Request

ScoreRows = Callable[[Sequence[Row]], Sequence[Score]]
ContinueRequests = Callable[[Sequence[Request]], Sequence[str]]


@dataclass(frozen=True)
class TaskScore:
    """One line of the table of results."""

    task: str
    filter: str
    num_fewshot: int | None
    metric: str
    value: float
    error: float | None
    """Standard error, where there is one."""

    higher_is_better: bool
    documents: int
    version: str = ""

    @property
    def key(self) -> str:
        """The value's name in records: eval/TASK/METRIC, with the filter's name where there are filters."""
        return f"eval/{self.task}/{self.metric}" + (f",{self.filter}" if self.filter != "none" else "")


@dataclass(frozen=True)
class Results:
    scores: list[TaskScore]
    """Of all tasks, then of all groups."""

    samples: list[dict[str, Any]]
    """The result of each document."""


@dataclass
class PreparedTask:
    """A task with its documents in tokens."""

    task: Task
    samples: list[Sample]
    rows: list[list[list[Row]]] = field(default_factory=list)
    """[sample][request]: its rows; one, or several of a rolling log-likelihood."""

    generations: list[Request] = field(default_factory=list)
    """Of generation: [sample]."""

    cut: int = 0
    """Requests of which tokens were cut on the left."""


@dataclass(frozen=True)
class Suite:
    """All tasks of a run. The same on every rank."""

    tasks: list[PreparedTask]
    groups: list[Group]
    tokenizer: Tokenizer

    @classmethod
    def load(
        cls,
        paths: Sequence[str],
        tokenizer: Tokenizer,
        longest: int,
        limit: int | None = None,
        num_fewshot: int | None = None,
    ) -> Suite:
        """Reads task files and their documents. `longest` is the number of tokens that the model reads.

        Raises ValueError with all problems, a line each."""
        tasks, groups = read_tasks(paths, num_fewshot)
        prepared, problems = [], list[str]()
        for task in tasks:
            try:
                prepared.append(_prepared(task, build_samples(task, limit), tokenizer, longest))
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("\n".join(problems))
        return cls(prepared, groups, tokenizer)

    @property
    def notes(self) -> Iterator[str]:
        """A line for each task of which something was cut."""
        for each in self.tasks:
            if each.cut:
                requests = sum(len(sample.requests) for sample in each.samples)
                yield f"task {each.task.name}: {each.cut} of {requests} requests are too long and are cut on the left"

    def evaluate(self, score_rows: ScoreRows, continue_requests: ContinueRequests) -> Results:
        """Scores all tasks. Rows of all tasks are passed at once, none twice, and so are the prompts of all."""
        found = scores_by_row(
            score_rows, (row for each in self.tasks for sample in each.rows for request in sample for row in request)
        )
        generations = [request for each in self.tasks for request in each.generations]
        texts = iter(continue_requests(generations) if generations else ())
        scores, samples = list[TaskScore](), list[dict[str, Any]]()
        for each in self.tasks:
            answers: list[Any] = [[together(found, request) for request in sample] for sample in each.rows]
            new_scores, new_samples = _task_results(each, answers or [next(texts) for _ in each.generations])
            scores += new_scores
            samples += new_samples
        return Results([*scores, *_group_scores(self.groups, scores)], samples)


def scores_by_row(score_rows: ScoreRows, rows: Iterable[Row]) -> dict[Row, Score]:
    """The score of each row, computed once for equal ones."""
    different = list(dict.fromkeys(rows))
    return dict(zip(different, score_rows(different) if different else (), strict=True))


def together(found: Mapping[Row, Score], rows: Sequence[Row]) -> tuple[float, bool]:
    """(log-likelihood, whether it is greedy) of a text in several rows."""
    return sum(found[row].log_likelihood for row in rows), all(found[row].is_greedy for row in rows)


def _prepared(task: Task, samples: list[Sample], tokenizer: Tokenizer, longest: int) -> PreparedTask:
    found, problems = PreparedTask(task, samples), list[str]()
    for sample in samples:
        try:
            if task.output_type == "generate_until":
                until = task.fewshot.fewshot_delimiter
                generation, cut = greedy_request(
                    tokenizer, sample.requests[0][0], task.generation_kwargs, until, longest
                )
                found.generations.append(generation)
                found.cut += cut > 0
                continue
            rows = []
            for context, continuation in sample.requests:
                if task.output_type == "loglikelihood_rolling":
                    rows.append(list(rolling_rows(tokenizer, continuation, longest)))
                    continue
                row, cut = continuation_row(tokenizer, context, continuation, longest)
                found.cut += cut > 0
                rows.append([row])
            found.rows.append(rows)
        except ValueError as error:
            problems.append(f"{where(task)}: document {sample.index} of {task.split}: {error}; correct the task")
    if problems:
        raise ValueError("\n".join(problems[:5]))
    return found


def _task_results(each: PreparedTask, answers: Sequence[Any]) -> tuple[list[TaskScore], list[dict[str, Any]]]:
    """`answers`: of each document the generated text, or (log-likelihood, whether it is greedy) of each request."""
    task, scores, samples = each.task, list[TaskScore](), list[dict[str, Any]]()
    for name, steps in task.filters:
        by_document = []
        for sample, answer in zip(each.samples, answers, strict=True):
            if task.output_type == "generate_until":
                filtered = reduce(lambda text, step: step(text), steps, answer)
                own = generated_scores(task, sample, filtered)
                about = {"generated": answer, "filtered": filtered, **own}
            else:
                own = _scores_of(task, sample, answer)
                about = {"log_likelihoods": [log for log, _ in answer], "is_greedy": [greedy for _, greedy in answer]}
                about |= {key: value for key, value in own.items() if isinstance(value, float)}
            by_document.append(own)
            target = sample.target if isinstance(sample.target, str | int | list) else str(sample.target)
            samples.append({"task": task.name, "filter": name, "document": sample.index, "target": target, **about})
        for metric in task.metrics:
            values = [document[metric.name] for document in by_document]
            value, error = AGGREGATIONS[metric.aggregation](values), standard_error(metric.aggregation, values)
            facts = (metric.higher_is_better, len(values), str(task.metadata.get("version", "")))
            scores.append(TaskScore(task.name, name, task.num_fewshot, metric.name, value, error, *facts))
    return scores, samples


def _scores_of(task: Task, sample: Sample, answer: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    logs, greedy = [log for log, _ in answer], [each for _, each in answer]
    if task.output_type == "multiple_choice":
        scores = choice_scores(logs, greedy, sample.choices, sample.target)
    elif task.output_type == "loglikelihood":
        scores = text_scores(logs[0], greedy[0])
    else:
        scores = rolling_scores(logs[0], sample.target)
    return {metric.name: scores[metric.name] for metric in task.metrics}


def _group_scores(groups: Sequence[Group], scores: Sequence[TaskScore]) -> Iterator[TaskScore]:
    """Means of groups, of groups of groups too."""
    members = {group.name: group.tasks for group in groups}

    def tasks_of(name: str, inside: tuple[str, ...] = ()) -> list[str]:
        if name not in members:
            return [name]
        below = () if name in inside else members[name]
        return [task for each in below for task in tasks_of(each, (*inside, name))]

    for group in groups:
        tasks = list(dict.fromkeys(tasks_of(group.name)))
        of_group = [score for score in scores if score.task in tasks]
        wanted = dict(group.metrics) if group.metrics else {score.metric: True for score in of_group}
        for metric, filter_name in dict.fromkeys((score.metric, score.filter) for score in of_group):
            each = [score for score in of_group if (score.metric, score.filter) == (metric, filter_name)]
            if metric not in wanted or len(each) < len(tasks):
                continue
            sizes, errors = [score.documents for score in each], [score.error for score in each]
            value, error = mean_of_tasks([score.value for score in each], errors, sizes, wanted[metric])
            better = each[0].higher_is_better
            yield TaskScore(group.name, filter_name, None, metric, value, error, better, sum(sizes))


HEAD = ("Tasks", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr")
LEFT = {0, 2, 4}
"""Columns of text."""


def table(scores: Sequence[TaskScore]) -> str:
    """A table in Markdown, as lm-evaluation-harness prints it."""
    rows = [list(HEAD)]
    for score in scores:
        shots = "" if score.num_fewshot is None else str(score.num_fewshot)
        arrow = "↑" if score.higher_is_better else "↓"
        error = "N/A" if score.error is None else f"{score.error:.4f}"
        name = score.task, score.version, score.filter, shots, score.metric
        rows.append([*name, arrow, f"{score.value:.4f}", "±", error])
    columns = [(max(map(len, column)), place in LEFT) for place, column in enumerate(zip(*rows, strict=True))]

    def line(cells: Sequence[str]) -> str:
        aligned = zip(cells, columns, strict=True)
        return "|" + "|".join(cell.ljust(width) if left else cell.rjust(width) for cell, (width, left) in aligned) + "|"

    rule = line(["-" * (width - 1) + ("-" if left or width < 2 else ":") for width, left in columns])
    return "\n".join([line(rows[0]), rule, *map(line, rows[1:])])


def record_of(scores: Sequence[TaskScore]) -> dict[str, Any]:
    """Values and standard errors by their names in records."""
    record: dict[str, Any] = {}
    for score in scores:
        record[score.key] = score.value
        if score.error is not None:
            name, comma, filter_name = score.key.partition(",")
            record[f"{name}_stderr{comma}{filter_name}"] = score.error
    return record
