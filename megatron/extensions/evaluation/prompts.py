"""Documents of a task's splits, from local files, and their requests: contexts with their few-shot examples, and what
is to follow them. No torch.

A task's fields for a document are jinja templates, columns, or functions.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template
from jinja2.sandbox import SandboxedEnvironment

from megatron.extensions.evaluation.metrics import exact_match
from megatron.extensions.evaluation.task_file import FLAG, Task
from megatron.extensions.text_data.formats import read_rows
from megatron.extensions.text_data.inputs import FORMATS, TextFile, find_inputs

BUILDERS = {"json": "jsonl", "csv": "csv", "parquet": "parquet", "arrow": "arrow", "text": "text"}
"""dataset_path of local files -> format of those whose name says nothing."""


class Documents(list[dict[str, Any]]):
    """Documents of a split, with as much of a data set's interface as functions of task files use."""

    @property
    def column_names(self) -> list[str]:
        return list(self[0]) if self else []

    def map(self, function: Callable[[dict[str, Any]], dict[str, Any]], **_: Any) -> Documents:
        return Documents([document | function(dict(document)) for document in self])

    def filter(self, function: Callable[[dict[str, Any]], bool], **_: Any) -> Documents:
        return Documents([document for document in self if function(dict(document))])

    def select(self, indices: Any) -> Documents:
        return Documents([self[index] for index in indices])


def read_splits(task: Task) -> dict[str, Documents]:
    """The splits that a task names, after its process_docs. Raises ValueError with every problem, a line each."""
    named = (task.training_split, task.validation_split, task.test_split, task.fewshot_split, task.fewshot.split)
    wanted = dict.fromkeys(filter(None, named))
    problems: list[str] = []
    found: dict[str, Documents] = {}
    for split in wanted:
        try:
            files = list(split_files(task, split))
            rows = Documents([row for file in files for row in read_rows(file)])
            found[split] = Documents(task.process_docs(rows)) if task.process_docs is not None else rows
        except Exception as error:  # process_docs may raise anything
            lines = str(error) if isinstance(error, ValueError) else f"process_docs: {type(error).__name__}: {error}"
            problems += [line if line.startswith(FLAG) else f"{where(task)}: {line}" for line in lines.splitlines()]
            continue
        if not found[split]:
            problems.append(f"{where(task)}: split {split!r} has no documents; correct its files or process_docs")
    if problems:
        raise ValueError("\n".join(problems))
    return found


def where(task: Task) -> str:
    return f"{FLAG} {task.path}"


def split_files(task: Task, split: str) -> Iterator[TextFile]:
    """Files of a split: those that data_files names, or those of a folder whose names begin with the split's.

    Relative paths are looked for in the current folder, then beside the task file. Raises ValueError."""
    folder, kwargs = _present(task, task.dataset_path), task.dataset_kwargs
    names = kwargs.get("data_files", kwargs.get("data_dir"))
    if task.dataset_path in BUILDERS and names is not None:
        if isinstance(names, dict):
            if split not in names:
                listed = ", ".join(map(repr, names))
                raise ValueError(f"data_files has no split {split!r}; it has {listed}")
            names = names[split]
        elif split != "train":
            raise ValueError(f"data_files without names of splits is split 'train', not {split!r}; name the splits")
        for name in names if isinstance(names, list) else [names]:
            place = str(_present(task, name) or name)
            for file in find_inputs([place], where(task)):
                yield replace(file, format=file.format or BUILDERS[task.dataset_path])
        return
    if folder is None or not folder.is_dir():
        raise ValueError(
            f"dataset_path {task.dataset_path!r} is no local folder: nothing is downloaded; use dataset_path: json "
            "(csv, parquet, text) with dataset_kwargs: data_files, or the folder of a downloaded data set"
        )
    inside = folder / task.dataset_name if task.dataset_name and (folder / task.dataset_name).is_dir() else folder
    paths = sorted(
        path
        for path in (*inside.glob(f"{split}*"), *inside.glob(f"data/{split}*"))
        if any(suffix in FORMATS for suffix in path.suffixes)
    )
    if not paths:
        raise ValueError(f"folder {inside} has no file of split {split!r}; name one {split}.jsonl, or use data_files")
    yield from find_inputs([str(path) for path in paths], where(task))


def _present(task: Task, name: str) -> Path | None:
    places = (Path(name), task.path.parent / name)
    return next((place for place in places if place.exists()), None)


Document = Mapping[str, Any]


@cache
def _environment() -> SandboxedEnvironment:
    environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["regex_replace"] = lambda text, pattern, repl, count=0: re.sub(pattern, repl, text, count=count)
    return environment


@cache
def _template(source: str) -> Template:
    return _environment().from_string(source)


def rendered(source: str, document: Document) -> str:
    """The text of a template. Raises jinja2.TemplateError."""
    return _template(source).render(**document)


def text_of(source: Any, document: Document, has_choices: bool) -> Any:
    """doc_to_text: text, or the number of the right text among doc_to_choice."""
    if callable(source):
        return source(document)
    if not isinstance(source, str):
        return source
    if source in document:
        return document[source]
    text = rendered(source, document)
    return int(text) if has_choices and text.isdigit() else text


def target_of(source: Any, document: Document, has_choices: bool) -> Any:
    """doc_to_target: text, the number of a choice, or a list of either."""
    text = text_of(source, document, has_choices)
    if not isinstance(source, str) or source in document or not isinstance(text, str):
        return text
    if len(text) >= 2 and text[0] == "[" and text[-1] == "]":
        try:
            return ast.literal_eval(text)
        except (SyntaxError, ValueError):
            return text
    return text


def choices_of(source: Any, document: Document) -> list[str]:
    """doc_to_choice. Raises ValueError unless it is a list of at least two texts."""
    if callable(source):
        found = source(document)
    elif isinstance(source, str):
        found = document[source] if source in document else ast.literal_eval(rendered(source, document))
    else:
        found = list(source.values()) if isinstance(source, Mapping) else source
    if not isinstance(found, list | tuple) or len(found) < 2 or not all(isinstance(each, str) for each in found):
        raise ValueError(f"doc_to_choice {found!r} must be a list of at least two texts")
    return list(found)


FEWSHOT_SEED = 1234
"""lm-evaluation-harness' default: the same seed draws the same examples."""

SHOWN_PROBLEMS = 5


@dataclass(frozen=True)
class Sample:
    """A document of a task as requests."""

    index: int
    """Of the document in its split."""

    requests: tuple[tuple[str, str], ...]
    """(context, continuation); of a rolling log-likelihood ("", text), of generation (context, "")."""

    target: Any
    """Text, the number of the right choice, or a list."""

    choices: tuple[str, ...] = ()


def build_samples(task: Task, limit: int | None = None) -> list[Sample]:
    """The requests of the first `limit` documents. Raises ValueError with every problem, a line each."""
    splits = read_splits(task)
    assert task.split is not None
    documents = splits[task.split]
    examples = _Examples(task, splits)
    samples, problems = [], list[str]()
    for index, document in enumerate(documents[:limit]):
        try:
            samples.append(_sample(task, index, document, examples))
        except Exception as error:  # of templates, and of functions that a task file names
            problems.append(f"{where(task)}: document {index} of {task.split}: {_told(error, document)}")
            if len(problems) == SHOWN_PROBLEMS:
                break
    if problems:
        raise ValueError("\n".join(problems))
    return samples


def _told(error: Exception, document: Document) -> str:
    text = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    keys = ", ".join(map(repr, list(document)[:8]))
    return f"{' '.join(text.split())}; correct the template, or the document, whose keys are {keys}"


def _sample(task: Task, index: int, document: Document, examples: _Examples) -> Sample:
    with_choices = task.doc_to_choice is not None
    target = target_of(task.doc_to_target, document, with_choices)
    if task.output_type == "loglikelihood_rolling":
        return Sample(index, (("", _text(target, "doc_to_target")),), target)
    before = (rendered(task.description, document) if task.description else "") + examples.text(document)
    text = text_of(task.doc_to_text, document, with_choices)
    if task.output_type == "multiple_choice":
        choices = choices_of(task.doc_to_choice, document)
        delimiter = task.target_delimiter
        if isinstance(text, int):  # the choices are contexts, and doc_to_text says which is right
            _check_right(text, choices, "doc_to_text")
            requests = [(before + choice, delimiter + str(target)) for choice in choices]
            return Sample(index, tuple(requests), text, tuple(choices))
        for each in target if isinstance(target, list) else [target]:
            _check_right(each, choices, "doc_to_target")
        requests = [(before + _text(text, "doc_to_text"), delimiter + choice) for choice in choices]
        if any(metric.name == "acc_mutual_info" for metric in task.metrics):
            requests += [("", delimiter + choice) for choice in choices]
        return Sample(index, tuple(requests), target, tuple(choices))
    context = before + _text(text, "doc_to_text")
    if task.output_type == "loglikelihood":
        return Sample(index, ((context, _text(target, "doc_to_target")),), target)
    if with_choices:
        target = choices_of(task.doc_to_choice, document)[target]
    return Sample(index, ((context, ""),), target)


def _check_right(right: Any, choices: Sequence[str], name: str) -> None:
    """Raises ValueError unless `right` is the number of a choice, or a choice."""
    if right not in choices if isinstance(right, str) else not (isinstance(right, int) and 0 <= right < len(choices)):
        raise ValueError(f"{name} {right!r} is none of the {len(choices)} choices, nor the number of one from 0 on")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} {value!r} is not text")
    return value


class _Examples:
    """Examples before each document, drawn as lm-evaluation-harness draws them: one generator of random numbers for
    the task, which is asked once a document, in their order."""

    def __init__(self, task: Task, splits: dict[str, Documents]) -> None:
        self.task, self.fewshot = task, task.fewshot
        self.random = random.Random(FEWSHOT_SEED)
        self.count, own = task.num_fewshot or 0, self.fewshot.split
        # One's own document is left out where it could be drawn.
        self.avoids = own == task.test_split
        known = task.training_split or task.validation_split or task.test_split
        self.pool: Sequence[Document] = splits[own or str(known)]
        if own is None and self.fewshot.samples is not None:
            self.pool = self.fewshot.samples
        if self.fewshot.fewshot_indices:
            self.pool = [self.pool[index] for index in self.fewshot.fewshot_indices]
        needed = self.count + (self.avoids and bool(self.count))
        if needed > len(self.pool):
            raise ValueError(
                f"{where(task)}: num_fewshot {self.count}: there are {len(self.pool)} documents to draw "
                f"{needed} from; lower it, or name a larger fewshot_split"
            )

    def text(self, document: Document) -> str:
        return "".join(map(self._written, self._drawn(document)))

    def _drawn(self, document: Document) -> Sequence[Document]:
        count = self.count
        if not count:
            return ()
        others = [each for each in self.pool if each != document] if self.avoids else self.pool
        if self.fewshot.sampler == "first_n":
            return others[:count]
        if not self.avoids:
            return self.random.sample(list(self.pool), count)
        drawn = [each for each in self.random.sample(list(self.pool), count + 1) if each != document][:count]
        return drawn if len(drawn) == count else self.random.sample(list(others), count)

    def _written(self, example: Document) -> str:
        fewshot = self.fewshot
        with_choices = fewshot.doc_to_choice is not None
        text = text_of(fewshot.doc_to_text, example, with_choices)
        answer = target_of(fewshot.doc_to_target, example, with_choices)
        choices = choices_of(fewshot.doc_to_choice, example) if with_choices else []
        if isinstance(text, int):
            text = choices[text]
        elif choices and isinstance(answer, int):
            answer = choices[answer]
        if isinstance(answer, list):
            answer = answer[0]
        if answer is None or answer == "":
            return _text(text, "doc_to_text")
        return _text(text, "doc_to_text") + fewshot.target_delimiter + str(answer) + fewshot.fewshot_delimiter


def generated_scores(task: Task, sample: Sample, text: str) -> dict[str, float]:
    """Scores of a generated text that is filtered."""
    targets = [str(each) for each in (sample.target if isinstance(sample.target, list) else [sample.target])]
    return {metric.name: exact_match(str(text), targets, metric.options) for metric in task.metrics}
