"""Requests in JSON, of files and of the server: fields, their types, and what is wrong with them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from typing import Any

from megatron.extensions.inference.generation import Sampling


class Fields:
    """Reads the fields of a JSON object one by one and collects what is wrong."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body
        self.problems: list[tuple[str, str]] = []
        """(field, what is wrong with it)"""

    def only(self, known: Collection[str]) -> None:
        """Every other field is a mistake."""
        for name in self.body.keys() - set(known):
            near = difflib.get_close_matches(name, known, 1)
            self.refuse(name, f"is no field of this request{f'; did you mean {near[0]}' if near else ''}")

    def refuse(self, name: str, problem: str) -> None:
        self.problems.append((name, problem))

    def whole(self, name: str, default: Any, least: int = 0, most: int | None = None) -> Any:
        """A whole number in a range, or null for the default."""
        value = self.body.get(name)
        if value is None:
            return default
        bound = f"from {least} to {most}" if most is not None else f"of at least {least}"
        if type(value) is not int or value < least or (most is not None and value > most):
            self.refuse(name, f"must be a whole number {bound}, not {shown(value)}")
            return default
        return value

    def number(self, name: str, default: Any) -> Any:
        value = self.body.get(name)
        if value is None:
            return default
        if type(value) not in (int, float) or value != value or abs(value) == float("inf"):
            self.refuse(name, f"must be a number, not {shown(value)}")
            return default
        try:
            return float(value)
        except OverflowError:
            self.refuse(name, "is too large")
            return default

    def switch(self, name: str) -> bool:
        value = self.body.get(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, f"must be true or false, not {shown(value)}")
        return value is True

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """A text or a list of texts, none of them empty."""
        value = self.body.get(name)
        found = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(found, list) or not all(isinstance(each, str) and each for each in found):
            self.refuse(name, f"must be a text or a list of texts, none of them empty, not {shown(value)}")
            return ()
        if len(found) > most:
            self.refuse(name, f"has {len(found)} texts, and may have {most}")
        return tuple(found)

    def tokens(self, name: str) -> frozenset[int]:
        value = self.body.get(name)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or any(type(each) is not int for each in value):
            self.refuse(name, f"must be a list of token ids, not {shown(value)}")
            return frozenset()
        return frozenset(value)

    def sampling(self, default: Sampling) -> Sampling:
        """Of temperature, top_k, top_p, min_p and repetition_penalty."""
        values = {
            "temperature": self.number("temperature", default.temperature),
            "top_k": self.whole("top_k", default.top_k, least=-1),
            "top_p": self.number("top_p", default.top_p),
            "min_p": self.number("min_p", default.min_p),
            "repetition_penalty": self.number("repetition_penalty", default.repetition_penalty),
        }
        if values["top_k"] is not None and values["top_k"] < 1:  # as elsewhere, for no limit
            values["top_k"] = None
        try:
            return Sampling(**values)
        except ValueError as error:
            for line in str(error).splitlines():
                flag, _, problem = line.partition(" ")
                self.refuse(flag.removeprefix("--").replace("-", "_"), problem)
            return default


SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def shown(value: Any) -> str:
    """A value as it stands in JSON, cut to a readable length."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


def parsed(data: bytes) -> dict[str, Any]:
    """A JSON object in UTF-8. Raises ValueError that says where it is none."""
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: byte {error.start}") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, not {shown(value)}")
    if b"\\u" in data:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("has an escape such as \\ud83d that is half of a character") from None
    return value
