"""Task files in lm-evaluation-harness' YAML form: reads them and reports everything that is wrong with them. No torch.

https://github.com/EleutherAI/lm-evaluation-harness, docs/task_guide.md
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from megatron.extensions.evaluation.metrics import AGGREGATIONS, FILTERS, METRICS, Metric

FLAG = "--eval-tasks"

OUTPUT_TYPES = ("multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until")

SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")

IGNORED = {"task_alias", "should_decontaminate", "doc_to_decontamination_query", "unsafe_code"}
"""Keys of a task that change no score."""

GROUP_KEYS = {"group", "group_alias", "task", "aggregate_metric_list", "metadata", "include"}

GENERATION_KEYS = {
    *("until", "do_sample", "temperature", "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"),
    *("top_p", "top_k"),
}

NOT_BUILT = {
    "process_results": "scores by code of its own are not computed; name metrics in metric_list",
    "use_prompt": "promptsource is not read; write the prompt as doc_to_text",
    "doc_to_image": "images are not read",
    "doc_to_audio": "audio is not read",
    "custom_dataset": "write the documents to a file and name it in dataset_kwargs: data_files",
    "class": "tasks in Python are not run; write the task as templates",
    "gen_prefix": "write the prefix at the end of doc_to_text",
}


@dataclass(frozen=True)
class Fewshot:
    """Which examples stand before a document, and how they are written: the keys of fewshot_config."""

    split: str | None = None
    sampler: str = "default"
    samples: list[dict[str, Any]] | None = None
    fewshot_indices: list[int] | None = None
    doc_to_text: Any = None
    doc_to_target: Any = None
    doc_to_choice: Any = None
    fewshot_delimiter: str = "\n\n"
    target_delimiter: str = " "


@dataclass(frozen=True)
class TaskKeys:
    """The keys of a task's file that change scores, with the defaults of lm-evaluation-harness."""

    output_type: str = "generate_until"
    dataset_path: str = ""
    dataset_name: str | None = None
    dataset_kwargs: Mapping[str, Any] = field(default_factory=dict)
    training_split: str | None = None
    validation_split: str | None = None
    test_split: str | None = None
    fewshot_split: str | None = None
    process_docs: Callable[[Any], Any] | None = None
    doc_to_text: Any = None
    doc_to_target: Any = None
    doc_to_choice: Any = None
    description: Any = ""
    target_delimiter: str = " "
    fewshot_delimiter: str = "\n\n"
    fewshot_config: Mapping[str, Any] = field(default_factory=dict)
    num_fewshot: int | None = None
    metric_list: Any = None
    filter_list: Sequence[Mapping[str, Any]] = ()
    generation_kwargs: Mapping[str, Any] = field(default_factory=dict)
    repeats: int = 1
    tag: Any = None
    group: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task(TaskKeys):
    """One task, as its file says."""

    name: str = ""
    path: Path = Path()
    fewshot: Fewshot = Fewshot()
    metrics: tuple[Metric, ...] = ()
    filters: tuple[tuple[str, tuple[Callable[[str], str], ...]], ...] = ()
    """(name, steps) of each of `filter_list`: one score each."""

    @property
    def split(self) -> str | None:
        """The split that is scored."""
        return self.test_split or self.validation_split

    @property
    def tags(self) -> list[str]:
        """The groups that the task says it belongs to."""
        listed = (each if isinstance(each, list) else [each] if each else [] for each in (self.tag, self.group))
        return [str(tag) for tags in listed for tag in tags]


TASK_KEYS = {each.name for each in fields(TaskKeys)}
FEWSHOT_KEYS = {each.name for each in fields(Fewshot)}


@dataclass(frozen=True)
class Group:
    """Tasks whose mean is printed."""

    name: str
    tasks: tuple[str, ...]
    metrics: tuple[tuple[str, bool], ...] | None = None
    """(metric, whether tasks count by their documents) of each mean; None for all metrics that all tasks have."""


def read_tasks(paths: Sequence[str], num_fewshot: int | None = None) -> tuple[list[Task], list[Group]]:
    """The tasks and groups of files and folders, in the order given. In a folder, files that only others include (no
    `task`, or a name that begins with _) are ignored.

    `num_fewshot` replaces the files' count, but for tasks that say 0. Raises ValueError with all problems, a line each.
    """
    problems: list[str] = []
    found: list[tuple[Path, dict[str, Any]]] = []
    for path, in_folder in _files(paths, problems):
        values = _read(path, problems)
        if values is None or (in_folder and "task" not in values):
            continue
        found.append((path, values))
    tasks, groups = dict[str, Task](), list[Group]()
    for path, values in found:
        if isinstance(values.get("task"), list):
            groups += _group(path, values, problems)
            continue
        task = _task(path, values, num_fewshot, problems)
        if task is not None and task.name in tasks:
            first = tasks[task.name].path
            problems.append(f"{FLAG} {path}: task {task.name!r} is in {first} already; rename one, or leave it out")
        elif task is not None:
            tasks[task.name] = task
    tags = dict.fromkeys(tag for task in tasks.values() for tag in task.tags)
    groups += [Group(tag, tuple(name for name, task in tasks.items() if tag in task.tags)) for tag in tags]
    problems += _check_groups(groups, tasks) if not problems else []
    if not found and not problems:
        problems.append(f"{FLAG} {' '.join(paths)}: there is no task in it; give a file with the key task")
    if problems:
        raise ValueError("\n".join(problems))
    return list(tasks.values()), groups


def _files(paths: Sequence[str], problems: list[str]) -> Iterator[tuple[Path, bool]]:
    for name in paths:
        path = Path(name)
        if path.is_dir():
            inside = sorted(each for suffix in ("*.yaml", "*.yml") for each in path.rglob(suffix))
            files = [each for each in inside if not each.name.startswith("_")]
            if not files:
                problems.append(f"{FLAG} {name}: the folder has no .yaml file; name a folder of task files")
            yield from ((each, True) for each in files)
        elif path.is_file():
            yield path, False
        else:
            problems.append(f"{FLAG} {name}: there is no such file; the path is taken from {Path.cwd()}")


class _Function(str):
    """`!function module.name` of a task file."""


class _Loader(yaml.SafeLoader):
    pass


_Loader.add_constructor("!function", lambda loader, node: _Function(loader.construct_scalar(node)))  # type: ignore[arg-type]


def _read(path: Path, problems: list[str], inside: tuple[Path, ...] = ()) -> dict[str, Any] | None:
    """The keys of a file over those of the files that it includes; functions are loaded."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        text = " ".join(str(error).split())
        problems.append(f"{FLAG} {path}: cannot be read as YAML: {text}; correct it")
        return None
    if not isinstance(values, dict):
        problems.append(f"{FLAG} {path}: is not a mapping of keys to values; see docs/evaluation.md")
        return None
    try:
        values = {key: _loaded(value, path) for key, value in values.items()}
    except ValueError as error:
        problems.append(f"{FLAG} {path}: {error}")
        return None
    included = values.pop("include", None)
    base: dict[str, Any] = {}
    for name in included if isinstance(included, list) else [included] if included else []:
        other = Path(name) if Path(name).is_absolute() else path.parent / name
        if other.resolve() in (*inside, path.resolve()):
            problems.append(f"{FLAG} {path}: includes itself by way of {other}; remove one include")
            return None
        if not other.is_file():
            problems.append(f"{FLAG} {path}: include {name}: there is no such file; it is taken from {path.parent}")
            return None
        below = _read(other, problems, (*inside, path.resolve()))
        if below is None:
            return None
        base |= below
    return base | values


def _loaded(value: Any, path: Path) -> Any:
    if isinstance(value, _Function):
        module, _, name = value.rpartition(".")
        file = path.parent / (module.replace(".", "/") + ".py")
        spec = importlib.util.spec_from_file_location(f"eval_task_{module}", file) if file.is_file() else None
        if spec is None or spec.loader is None:
            raise ValueError(f"!function {value}: there is no {file}; put it beside the task file")
        loaded = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(loaded)
            return getattr(loaded, name)
        except Exception as error:
            raise ValueError(f"!function {value}: {type(error).__name__}: {error}; correct {file}") from None
    if isinstance(value, dict):
        return {key: _loaded(each, path) for key, each in value.items()}
    return [_loaded(each, path) for each in value] if isinstance(value, list) else value


def _group(path: Path, values: dict[str, Any], problems: list[str]) -> list[Group]:
    problems += _unknown(path, values, GROUP_KEYS, "a group")
    names = [each for each in values["task"] if isinstance(each, str)]
    if len(names) < len(values["task"]):
        problems.append(f"{FLAG} {path}: a group lists tasks by name; write each task in a file of its own")
    metrics = []
    listed = values.get("aggregate_metric_list") or []
    for each in listed if isinstance(listed, list) else [listed]:
        if not isinstance(each, dict) or "metric" not in each or each.get("aggregation", "mean") != "mean":
            problems.append(
                f"{FLAG} {path}: aggregate_metric_list: each needs a metric, and takes the mean; got {each}"
            )
            continue
        metrics.append((str(each["metric"]), bool(each.get("weight_by_size", True))))
    return [Group(str(values.get("group") or path.stem), tuple(names), tuple(metrics) or None)]


def _check_groups(groups: Sequence[Group], tasks: Mapping[str, Task]) -> Iterator[str]:
    known = {*tasks, *(group.name for group in groups)}
    for group in groups:
        if group.name in tasks:
            yield f"{FLAG} {tasks[group.name].path}: {group.name!r} names a task and a group; rename one"
        for name in group.tasks:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                yield (
                    f"{FLAG} {group.name}: the group's task {name!r} is in no file that is given; "
                    + (f"nearest: {near[0]}" if near else "add its file")
                )


def _unknown(path: Path, values: Mapping[str, Any], known: set[str], what: str) -> Iterator[str]:
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            remedy = NOT_BUILT.get(str(key)) or (f"nearest: {near[0]}" if near else "remove it")
            rule = "is not supported" if key in NOT_BUILT else f"is no key of {what}"
            yield f"{FLAG} {path}: {key!r} {rule}; {remedy}"


def _misshapen(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, what its value must be and is not)"""
    for key, value in sorted(values.items()):
        if key in ("dataset_path", "output_type", *SPLITS) and not isinstance(value, str):
            yield key, "text"
        elif key in ("dataset_kwargs", "generation_kwargs", "fewshot_config", "metadata"):
            if not isinstance(value, dict):
                yield key, "a mapping"
        elif key == "filter_list" and not _is_list_of_filters(value):
            yield key, "a list of mappings, each with a list of functions under filter"


def _is_list_of_filters(value: Any) -> bool:
    """Mappings, each with a list of mappings under filter."""
    return isinstance(value, list) and all(
        isinstance(each, dict)
        and isinstance(each.get("filter") or [], list)
        and all(isinstance(step, dict) and isinstance(step.get("function"), str) for step in each.get("filter") or [])
        for each in value
    )


def _task(path: Path, values: dict[str, Any], num_fewshot: int | None, problems: list[str]) -> Task | None:
    before = len(problems)
    problems += _unknown(path, values, {"task", *TASK_KEYS, *IGNORED}, "a task")

    def wrong(rule: str, remedy: str) -> None:
        problems.append(f"{FLAG} {path}: {rule}; {remedy}")

    given = {key: value for key, value in values.items() if key in TASK_KEYS and value is not None}
    misshapen = list(_misshapen(given))
    for key, kind in misshapen:
        wrong(f"{key} {values[key]!r} must be {kind}", "correct it, or remove it")
    if misshapen:
        return None  # what else is wrong cannot be judged
    task, name = Task(**given, path=path), values.get("task")
    if not isinstance(name, str) or not name:
        wrong("has no task", "give it a name: task: NAME")
    if task.output_type not in OUTPUT_TYPES:
        wrong(f"output_type {task.output_type!r} is unknown", f"use one of {', '.join(OUTPUT_TYPES)}")
    if not task.dataset_path:
        wrong("has no dataset_path", "write dataset_path: json, and the files in dataset_kwargs: data_files")
    if not task.split:
        wrong("names no split to score", "add test_split or validation_split")
    for key in ("doc_to_text", "doc_to_target") if task.output_type != "loglikelihood_rolling" else ("doc_to_target",):
        if getattr(task, key) is None:
            wrong(f"has no {key}", "write it as a jinja template, or name a column")
    if task.output_type == "multiple_choice" and task.doc_to_choice is None:
        wrong("output_type multiple_choice needs doc_to_choice", "list the choices, or name a column")
    if isinstance(task.doc_to_choice, list) and len(task.doc_to_choice) < 2:
        wrong(f"doc_to_choice has {len(task.doc_to_choice)} choice", "give at least two")
    if task.repeats != 1:
        wrong(f"repeats {task.repeats}: decoding is greedy and would repeat itself", "remove repeats")
    problems += _unknown(path, task.generation_kwargs, GENERATION_KEYS, "generation_kwargs")
    if asks_for_sampling(task.generation_kwargs):
        wrong("generation_kwargs ask for sampling", "decoding is greedy: remove do_sample and temperature")
    count = task.num_fewshot
    if count is not None and (type(count) is not int or count < 0):
        wrong(f"num_fewshot {count!r} must be a whole number", "0 for no examples")
    problems += _unknown(path, task.fewshot_config, FEWSHOT_KEYS, "fewshot_config")
    fewshot = _fewshot(task)
    if fewshot.sampler not in ("default", "first_n"):
        wrong(f"fewshot_config: sampler {fewshot.sampler!r} is unknown", "use default or first_n")
    metrics = _metrics(task, wrong) if task.output_type in OUTPUT_TYPES else ()
    filters = _filters(task, wrong)
    if len(problems) > before:
        return None
    count = num_fewshot if num_fewshot is not None and count != 0 else count or 0
    return replace(task, name=str(name), num_fewshot=count, fewshot=fewshot, metrics=metrics, filters=filters)


def asks_for_sampling(generation_kwargs: Mapping[str, Any]) -> bool:
    return bool(generation_kwargs.get("do_sample")) or float(generation_kwargs.get("temperature") or 0) > 0


def _fewshot(task: Task) -> Fewshot:
    """fewshot_config, and for what it leaves out the task's own keys."""
    own = {key: value for key, value in task.fewshot_config.items() if key in FEWSHOT_KEYS}
    shared = {key: getattr(task, key) for key in FEWSHOT_KEYS & TASK_KEYS}
    samples = own.get("samples")
    if samples is not None and not isinstance(samples, list):
        own["samples"] = list(samples()) if callable(samples) else []
    return Fewshot(**{"split": task.fewshot_split, **shared, **own})


def _metrics(task: Task, wrong: Callable[[str, str], None]) -> tuple[Metric, ...]:
    kind, listed = task.output_type, task.metric_list
    known = {name: facts for name, facts in METRICS.items() if kind in facts.output_types}
    if listed is None:
        return tuple(Metric(name, facts.aggregation) for name, facts in known.items() if kind in facts.default_of)
    found = []
    for each in listed if isinstance(listed, list) else [listed]:
        name = each.get("metric") if isinstance(each, dict) else None
        if name not in known:
            wrong(f"metric_list: {name!r} is no metric of {kind}", f"use one of {', '.join(known)}")
            continue
        aggregation = each.get("aggregation", known[name].aggregation)
        if aggregation not in AGGREGATIONS:
            wrong(f"metric_list: aggregation {aggregation!r} is unknown", f"use one of {', '.join(AGGREGATIONS)}")
        options = {key: value for key, value in each.items() if key not in ("metric", "aggregation")}
        better = options.pop("higher_is_better", known[name].higher_is_better)
        for key in options:
            if key not in known[name].options:
                wrong(f"metric_list: {key!r} is no option of {name}", f"remove it, or use {known[name].options}")
        found.append(Metric(name, aggregation, bool(better), options))
    return tuple(found)


def _filters(task: Task, wrong: Callable[[str, str], None]) -> tuple[Any, ...]:
    found = []
    for each in task.filter_list or [{"name": "none", "filter": [{"function": "take_first"}]}]:
        steps = []
        for step in each.get("filter") or []:
            options = {key: value for key, value in step.items() if key != "function"}
            try:
                steps.append(FILTERS[step.get("function")](**options))
            except KeyError:
                wrong(f"filter_list: {step.get('function')!r} is unknown", f"use one of {', '.join(FILTERS)}")
            except Exception as error:
                wrong(f"filter_list: {step.get('function')} {options}: {error}", "correct its options")
        found.append((str(each.get("name", "none")), tuple(steps)))
    return tuple(found)
