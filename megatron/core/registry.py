"""Registries: the named choices of each kind of part, the library's own and those that extensions add. This module does
not import torch.

A registry holds the library's own parts; `megatron.extensions.load`, which entry points call, adds the parts of the
built-in extensions. They are registered by where they are, "module:attribute", and imported when first used, so that
`--help` and validation need no torch. Facts that they need before a part is imported, such as whether an activation
function is gated, are registered with it as `facts`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import import_module
from inspect import Parameter, Signature, isfunction, signature
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast, overload

P = TypeVar("P")
F = TypeVar("F")
K = ParamSpec("K")
Given = TypeVar("Given")


@dataclass(frozen=True)
class NoFacts:
    """For parts of which nothing needs to be known before they are imported."""


@dataclass(frozen=True)
class _Entry(Generic[F]):
    part: Any
    facts: F
    where: str


def imported(where: Any) -> Any:
    """The object that a string "module:attribute" names; any other value unchanged."""
    if not isinstance(where, str):
        return where
    module, _, attribute = where.partition(":")
    return getattr(import_module(module), attribute)


def _unwritten(part: Any) -> str:
    """The methods of which a part's base class asks for one by `must_write`, if the part inherits all; else empty."""
    base = next((base for base in getattr(part, "__mro__", ()) if "must_write" in vars(base)), None)
    if base is None or any(getattr(part, name) is not getattr(base, name) for name in base.must_write):
        return ""
    return " or ".join(f"{name}()" for name in base.must_write)


def _is_protocol(cls: type) -> bool:
    return getattr(cls, "_is_protocol", False)


def _members(protocol: type) -> list[str]:
    """The names that a Protocol asks for, without `__call__`."""
    names: dict[str, None] = {}
    for base in reversed(protocol.__mro__):
        if _is_protocol(base) and base is not Protocol:
            names |= dict.fromkeys([*vars(base), *vars(base).get("__annotations__", ())])
    return [name for name in names if not name.startswith("_")]


def _call_form(protocol: type) -> str | None:
    """The arguments of a Protocol's `__call__`, with `=` after those by keyword; None if it is not to be called."""
    call = next((vars(base)["__call__"] for base in protocol.__mro__ if "__call__" in vars(base)), None)
    if call is None:
        return None
    parameters = list(signature(call).parameters.values())[1:]
    if any(parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) for parameter in parameters):
        return None
    return ", ".join(each.name + "=" * (each.kind is Parameter.KEYWORD_ONLY) for each in parameters)


def _refused(form: str, part: object) -> str:
    """The rule that a part breaks which cannot be called with the arguments of `form`, and the remedy; else empty."""
    words = form.split(", ")
    taken = f"a {type(part).__name__}"
    if callable(part):
        try:
            takes = signature(part)
        except ValueError:  # of a function in C, which does not say what it takes
            return ""
        try:
            takes.bind(*(w for w in words if w[-1] != "="), **{w[:-1]: True for w in words if w[-1] == "="})
        except TypeError:
            taken = str(takes)
        else:
            return ""
    return f"must take ({form}), and takes {taken}; correct its parameters"


def _refused_methods(protocol: type, part: type) -> str:
    """The methods of `protocol` that a class does not write or that cannot be called as they are there, and the remedy;
    else empty."""
    if unwritten := sorted(getattr(part, "__abstractmethods__", ())):
        return f"has no {', '.join(f'{name}()' for name in unwritten)} of its own; write it, or correct its spelling"
    for name in _members(protocol):
        wanted, given = getattr(protocol, name, None), getattr(part, name, None)
        if not isfunction(wanted) or not isfunction(given) or given is wanted:
            continue
        parameters = signature(wanted).parameters.values()
        if any(each.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) for each in parameters):
            continue
        by_name = {each.name: True for each in parameters if each.kind is Parameter.KEYWORD_ONLY}
        try:
            signature(given).bind(*(each.name for each in parameters if each.name not in by_name), **by_name)
        except TypeError:
            form, takes = _without_types(wanted), _without_types(given)
            return f"{name}() must take {form}, and takes {takes}; correct its parameters"
    return ""


def _without_types(function: Callable[..., object]) -> Signature:
    """The parameters of a method, without `self` and annotations."""
    parameters = list(signature(function).parameters.values())[1:]
    return Signature([each.replace(annotation=Parameter.empty) for each in parameters])


def refused_call(protocol: type, part: object) -> str:
    """Checks a function that stands beside a part, as one of its facts: says what is wrong if it cannot be called as
    `protocol` is, and is empty otherwise."""
    return _refused(form, part) if (form := _call_form(protocol)) else ""


class Registry(Collection[str], Generic[P, F, K]):
    """Name -> part of one kind, in order of registration. `flag` is how a command line chooses among them.

    `facts` makes the facts of a part from the keyword arguments of `register`. `protocol` is the Protocol of the parts:
    each must take the arguments of its `__call__` and have its other members. It may also be a plain class, whose
    instances the parts are. Where a part is called to make an object, `makes` is the Protocol of these objects, and
    each part that is a class must have its members, and methods that take the same arguments.
    """

    def __init__(
        self,
        flag: str,
        facts: Callable[K, F],
        *,
        protocol: type[P],
        makes: type | None = None,
    ) -> None:
        self.flag = flag
        self._make_facts: Callable[..., F] = facts
        self._form = _call_form(protocol) if _is_protocol(protocol) else None
        self._members = _members(protocol)
        self._class = object if _is_protocol(protocol) else protocol
        self._makes = makes
        self._entries: dict[str, _Entry[F]] = {}
        self._substitutes: dict[str, list[tuple[str, Callable[..., bool]]]] = {}

    @overload
    def register(self, name: str, /, *args: K.args, **facts: K.kwargs) -> Callable[[Given], Given]: ...
    @overload
    def register(self, name: str, part: Given, /, *args: K.args, **facts: K.kwargs) -> Given: ...
    def register(self, name: str, part: Any = None, /, *args: Any, **facts: Any) -> Any:
        """Adds a part, given or decorated; a string "module:attribute" is imported on first use.

        Raises ValueError if the name is taken, with file and line of both, or if the part has not the form of its kind.
        """
        caller = sys._getframe(1)
        where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        if name in self._entries:
            raise ValueError(
                f"{self.flag} {name} is registered twice: at {self._entries[name].where} and at {where}; "
                "give one of them another name"
            )

        try:
            known = self._make_facts(*args, **facts)
        except TypeError:
            wanted, given = (", ".join(names) or "none" for names in (signature(self._make_facts).parameters, facts))
            raise ValueError(
                f"{self.flag} {name}: the keywords of register() are {wanted}, and {given} given; correct them"
            ) from None
        except ValueError as error:
            raise ValueError(f"{self.flag} {name}: {error}") from None

        def add(part: Given) -> Given:
            if not isinstance(part, str):
                self._check(name, part)
            self._entries[name] = _Entry(part, known, where)
            return part

        return add if part is None else add(part)

    def substitute(self, name: str, part: str, when: Callable[..., bool]) -> None:
        """Makes `build` call `part`, "module:attribute", in place of the part `name` where `when` of the arguments is
        true: the same function of the same parameters, computed in another way. Configurations keep `name`."""
        self._substitutes.setdefault(name, []).append((part, when))

    def build(self, name: str, *args: Any) -> Any:
        """Calls the part, or the first of its substitutes that these arguments suit."""
        for part, when in self._substitutes.get(name, ()):
            if when(*args):
                return imported(part)(*args)
        return self[name](*args)  # type: ignore[operator]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, name: str) -> P:
        """The part. Raises ValueError for a name that nothing has registered."""
        entry = self._entry(name)
        if isinstance(entry.part, str):
            part = imported(entry.part)
            self._check(name, part)
            entry = self._entries[name] = replace(entry, part=part)
        return cast("P", entry.part)

    def _check(self, name: str, part: object) -> None:
        """Raises ValueError if a part cannot be called as its kind is, or lacks what it must have."""
        if unwritten := _unwritten(part):
            raise ValueError(f"{self.flag} {name}: has no {unwritten} of its own; write it, or correct its spelling")
        if not isinstance(part, self._class):
            rule = f"must be a {self._class.__name__}, and is a {type(part).__name__}"
            raise ValueError(f"{self.flag} {name}: {rule}; make one of it")
        made = self._makes if isinstance(part, type) else None
        wanted = self._members + ([] if made is None else _members(made))
        classes = part.__mro__ if isinstance(part, type) else (part,)
        known = set(dir(part)).union(*(getattr(each, "__annotations__", ()) for each in classes))
        if missing := [attribute for attribute in wanted if attribute not in known and not hasattr(part, attribute)]:
            raise ValueError(f"{self.flag} {name}: has no {', '.join(missing)}; derive it from the class of its kind")
        if self._form is not None and (refused := _refused(self._form, part)):
            raise ValueError(f"{self.flag} {name}: {refused}")
        if made is not None and isinstance(part, type) and (refused := _refused_methods(made, part)):
            raise ValueError(f"{self.flag} {name}: {refused}")

    def facts(self, name: str) -> F:
        """Facts about a part, without importing it. Raises ValueError as `registry[name]` does."""
        return self._entry(name).facts

    def wanted(self, *args: Any) -> list[str]:
        """The parts that a run wants, for kinds whose facts have a `when`: those of which `when(*args)` is true."""
        return [name for name, entry in self._entries.items() if entry.facts.when(*args)]  # type: ignore[attr-defined]

    def chosen(self, *args: Any) -> str | None:
        """The first of `wanted`, for kinds of which a run has one part at most; None for none."""
        return next(iter(self.wanted(*args)), None)

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
