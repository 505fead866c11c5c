"""Documents of a task's splits, from local files. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

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

    Relative paths are looked for in the present folder, then beside the task file. Raises ValueError."""
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
