"""Scores of documents, and of a task from those of its documents, as lm-evaluation-harness defines them. No torch."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Metric:
    """One of a task's `metric_list`."""

    name: str
    aggregation: str
    higher_is_better: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """Facts about a metric."""

    output_types: tuple[str, ...]
    aggregation: str = "mean"
    higher_is_better: bool = True
    default_of: tuple[str, ...] = ()
    """Output types of which it is scored where a task names no metrics."""

    options: tuple[str, ...] = ()


CHOICE, TEXT, ROLLING, GENERATED = "multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until"

METRICS = {
    "acc": Facts((CHOICE, TEXT), default_of=(CHOICE, TEXT)),
    "acc_norm": Facts((CHOICE,), default_of=(CHOICE,)),
    "acc_bytes": Facts((CHOICE,)),
    "acc_mutual_info": Facts((CHOICE,)),
    "brier_score": Facts((CHOICE,), "brier_score", higher_is_better=False),
    "perplexity": Facts((TEXT,), "perplexity", higher_is_better=False, default_of=(TEXT,)),
    "word_perplexity": Facts((ROLLING,), "weighted_perplexity", higher_is_better=False, default_of=(ROLLING,)),
    "byte_perplexity": Facts((ROLLING,), "weighted_perplexity", higher_is_better=False, default_of=(ROLLING,)),
    "bits_per_byte": Facts((ROLLING,), "bits_per_byte", higher_is_better=False, default_of=(ROLLING,)),
    "exact_match": Facts(
        (CHOICE, GENERATED),
        default_of=(GENERATED,),
        options=("regexes_to_ignore", "ignore_case", "ignore_punctuation", "ignore_numbers"),
    ),
}


def choice_scores(
    likelihoods: Sequence[float], greedy: Sequence[bool], choices: Sequence[str], gold: int | str | Sequence[int]
) -> dict[str, Any]:
    """Scores of a question of multiple choice. `likelihoods` are the logs of each choice, and behind these, if mutual
    information is scored, of each choice without the question."""
    count = len(choices)
    logs, alone = np.array(likelihoods[:count]), np.array(likelihoods[count:])
    right = _indices(gold, choices)
    lengths = np.array([float(len(choice)) for choice in choices])
    in_bytes = np.array([float(len(choice.encode())) for choice in choices])
    exponentials = np.exp(logs - logs.max())
    scores: dict[str, Any] = {
        "acc": float(logs.argmax() in right),
        "acc_norm": float((logs / lengths).argmax() in right),
        "acc_bytes": float((logs / in_bytes).argmax() in right),
        "exact_match": float(any(greedy[index] for index in right)),
        "brier_score": (right[0] if right else 0, exponentials / exponentials.sum()),
    }
    if len(alone):
        scores["acc_mutual_info"] = float((logs - alone).argmax() in right)
    return scores


def _indices(gold: int | str | Sequence[int], choices: Sequence[str]) -> list[int]:
    """The right choices; empty for one that is not there."""
    if isinstance(gold, str):
        return [choices.index(gold)] if gold in choices else []
    listed = [gold] if isinstance(gold, int) else list(gold)
    return [index for index in listed if 0 <= index < len(choices)]


def text_scores(likelihood: float, greedy: bool) -> dict[str, Any]:
    return {"acc": float(greedy), "perplexity": likelihood}


def rolling_scores(likelihood: float, text: str) -> dict[str, Any]:
    """Pairs of the log-likelihood of a whole text and the number of its words or bytes."""
    size = len(text.encode())
    words = len(re.split(r"\s+", text))
    return {
        "word_perplexity": (likelihood, words),
        "byte_perplexity": (likelihood, size),
        "bits_per_byte": (likelihood, size),
    }


def exact_match(generated: str, targets: Sequence[str], options: Mapping[str, Any]) -> float:
    """1 if the text is one of the targets, after what `options` remove from both."""
    return float(any(_plain(generated, options) == _plain(target, options) for target in targets))


def _plain(text: str, options: Mapping[str, Any]) -> str:
    for pattern in options.get("regexes_to_ignore") or ():
        text = re.sub(pattern, "", text)
    if options.get("ignore_case"):
        text = text.lower()
    for key, letters in (("ignore_punctuation", string.punctuation), ("ignore_numbers", string.digits)):
        if options.get(key):
            text = text.translate(str.maketrans("", "", letters))
    return text


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def perplexity(values: Sequence[float]) -> float:
    return _exp(-mean(values))


def weighted_perplexity(values: Sequence[tuple[float, int]]) -> float:
    return _exp(-_per_unit(values))


def bits_per_byte(values: Sequence[tuple[float, int]]) -> float:
    return -_per_unit(values) / math.log(2)


def brier_score(values: Sequence[tuple[int, np.ndarray]]) -> float:
    """Mean squared distance of the probabilities from 1 for the right choice and 0 for others."""
    return mean([float(((given - np.eye(len(given))[right]) ** 2).sum()) for right, given in values])


def _per_unit(values: Sequence[tuple[float, int]]) -> float:
    return sum(value for value, _ in values) / sum(count for _, count in values)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


AGGREGATIONS: dict[str, Callable[[Sequence[Any]], float]] = {
    "mean": mean,
    "median": median,
    "perplexity": perplexity,
    "weighted_perplexity": weighted_perplexity,
    "bits_per_byte": bits_per_byte,
    "brier_score": brier_score,
}


def standard_error(aggregation: str, values: Sequence[Any]) -> float | None:
    """Standard error of a task's score; None where lm-evaluation-harness has none.

    That of a perplexity is the one of the mean times the perplexity, to first order; the harness resamples."""
    if aggregation not in ("mean", "perplexity") or len(values) < 2:
        return None
    middle = mean(values)
    error = math.sqrt(sum((value - middle) ** 2 for value in values) / (len(values) - 1) / len(values))
    return error if aggregation == "mean" else error * perplexity(values)


def mean_of_tasks(
    values: Sequence[float], errors: Sequence[float | None], sizes: Sequence[int], by_size: bool
) -> tuple[float, float | None]:
    """Score and standard error of a group: weighted by documents, with the pooled variance, or of equal weights."""
    weights = list(sizes) if by_size else [1] * len(sizes)
    score = sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
    known = [error for error in errors if error is not None]
    if len(known) < len(errors):
        return score, None
    if not by_size:
        return score, math.sqrt(sum(error**2 for error in known)) / len(known)
    if sum(sizes) == len(sizes):
        return score, None
    pooled = sum((size - 1) * error**2 * size for size, error in zip(sizes, known, strict=True))
    return score, math.sqrt(pooled / (sum(sizes) - len(sizes)) / sum(sizes))


Step = Callable[[str], str]


def regex(regex_pattern: str = r"#### (\-?[0-9\.\,]+)", group_select: int = 0, fallback: str = "[invalid]") -> Step:
    """The match number `group_select` of all in the text, of several groups the first that is not empty; `fallback`
    without one. Raises re.error for a bad pattern."""
    pattern = re.compile(regex_pattern)

    def step(text: str) -> str:
        matches = pattern.findall(text)
        if not matches:
            return fallback
        match = matches[group_select]
        if isinstance(match, tuple):
            match = next((group for group in match if group), fallback)
        return match.strip()

    return step


def mapped(mapping_dict: Mapping[str, Any], default_value: Any = None) -> Step:
    return lambda text: mapping_dict.get(text, default_value)


FILTERS: dict[str, Callable[..., Step]] = {
    "take_first": lambda: str,  # one answer is generated
    "regex": regex,
    "remove_whitespace": lambda: str.strip,
    "lowercase": lambda: str.lower,
    "uppercase": lambda: str.upper,
    "map": mapped,
}
"""Name -> what makes the step of its options, by which an answer is read out of a generated text (`filter_list`)."""
