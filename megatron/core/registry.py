"""Registries: the named choices of each kind of part, the library's own and those that extensions add. No torch.

A built-in part is registered by where it is, "module:attribute", and imported when it is first used, so that `--help`
and validation need no torch. What they must know of a part without importing it, as whether an activation function is
gated, is registered beside it as `facts`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from inspect import signature
from typing import Any, Generic, TypeVar, overload

P = TypeVar("P")
F = TypeVar("F")
Given = TypeVar("Given")


@dataclass(frozen=True)
class NoFacts:
    """For parts of which nothing needs to be known before they are imported."""


@dataclass(frozen=True)
class _Entry(Generic[F]):
    part: Any
    facts: F
    where: str


class Registry(Collection[str], Generic[P, F]):
    """Name -> part of one kind, in order of registration. `flag` is how a command line chooses among them.

    `facts` makes the facts of a part from keyword arguments of `register`.
    """

    def __init__(self, flag: str, facts: Callable[..., F]) -> None:
        self.flag, self._make_facts = flag, facts
        self._entries: dict[str, _Entry[F]] = {}

    @overload
    def register(self, name: str, part: None = None, **facts: Any) -> Callable[[Given], Given]: ...
    @overload
    def register(self, name: str, part: Given, **facts: Any) -> Given: ...
    def register(self, name: str, part: Any = None, **facts: Any) -> Any:
        """Adds a part, given or decorated; a string "module:attribute" is imported on first use.

        Raises ValueError if the name is taken, with file and line of both.
        """
        caller = sys._getframe(1)
        where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        if name in self._entries:
            raise ValueError(
                f"{self.flag} {name} is registered twice: at {self._entries[name].where} and at {where}; "
                "give one of them another name"
            )

        try:
            known = self._make_facts(**facts)
        except TypeError:
            wanted, given = (", ".join(names) or "none" for names in (signature(self._make_facts).parameters, facts))
            raise ValueError(
                f"{self.flag} {name}: the keywords of register() are {wanted}, and {given} given; correct them"
            ) from None

        def add(part: Given) -> Given:
            self._entries[name] = _Entry(part, known, where)
            return part

        return add if part is None else add(part)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, name: str) -> P:
        """The part. Raises ValueError for a name that nothing has registered."""
        part = self._entry(name).part
        if isinstance(part, str):
            module, _, attribute = part.partition(":")
            part = getattr(import_module(module), attribute)
        return part

    def facts(self, name: str) -> F:
        """What is known of a part without importing it. Raises ValueError as `registry[name]` does."""
        return self._entry(name).facts

    def where(self, name: str) -> str:
        """File and line of its registration."""
        return self._entry(name).where

    def _entry(self, name: str) -> _Entry[F]:
        if name not in self._entries:
            near = get_close_matches(name, self._entries, n=1)
            remedy = f"nearest: {near[0]}, or" if near else "choose one of them, or"
            raise ValueError(
                f"{self.flag} {name}: must be one of {', '.join(self)}; {remedy} give the --extension that registers it"
            )
        return self._entries[name]
