"""Registries of named parts, which are interchangeable components such as activation functions or optimizers. A
registry contains the choices for one kind of part, built in or added by extensions. This module does not import torch.

A registry initially contains the parts of the library. Each entry point calls `megatron.extensions.load`, which adds
the parts of the built-in extensions. Parts are registered by import path, "module:attribute", and imported on first
use, so that `--help` and validation do not need torch. Facts that are needed before a part is imported, such as whether
an activation function is gated, are registered together with the part."""

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
    """Facts without fields, for a registry whose parts have no properties that must be known before a part is
    imported."""


@dataclass(frozen=True)
class _Entry(Generic[F]):
    part: Any
    facts: F
    where: str


def imported(where: Any) -> Any:
    """Import the object that a string "module:attribute" names. If `where` is not a string, return it unchanged."""
    if not isinstance(where, str):
        return where
    module, _, attribute = where.partition(":")
    return getattr(import_module(module), attribute)


def _unwritten(part: Any) -> str:
    """Check that a class overrides one of the methods that its base class lists in `must_write`. Return an empty string
    if it does, and the names of these methods otherwise."""
    base = next((base for base in getattr(part, "__mro__", ()) if "must_write" in vars(base)), None)
    if base is None or any(getattr(part, name) is not getattr(base, name) for name in base.must_write):
        return ""
    return " or ".join(f"{name}()" for name in base.must_write)


def _is_protocol(cls: type) -> bool:
    return getattr(cls, "_is_protocol", False)


def _members(protocol: type) -> list[str]:
    """Return the names of the members that a Protocol requires, except `__call__`."""
    names: dict[str, None] = {}
    for base in reversed(protocol.__mro__):
        if _is_protocol(base) and base is not Protocol:
            names |= dict.fromkeys([*vars(base), *vars(base).get("__annotations__", ())])
    return [name for name in names if not name.startswith("_")]


def _call_form(protocol: type) -> str | None:
    """Return the argument names of a Protocol's `__call__` as text. Keyword-only arguments are marked with `=`. The
    function returns None if the Protocol does not define `__call__`, or if `__call__` accepts `*args` or `**kwargs`."""
    call = next((vars(base)["__call__"] for base in protocol.__mro__ if "__call__" in vars(base)), None)
    if call is None:
        return None
    parameters = list(signature(call).parameters.values())[1:]
    if any(parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) for parameter in parameters):
        return None
    return ", ".join(each.name + "=" * (each.kind is Parameter.KEYWORD_ONLY) for each in parameters)


def _refused(form: str, part: object) -> str:
    """Check that a part can be called with the arguments in `form`, which is a result of `_call_form`. The function
    returns an empty string if the part conforms, and otherwise the violated rule and a remedy."""
    words = form.split(", ")
    taken = f"a {type(part).__name__}"
    if callable(part):
        try:
            takes = signature(part)
        except ValueError:  # a C function has no signature
            return ""
        try:
            takes.bind(*(w for w in words if w[-1] != "="), **{w[:-1]: True for w in words if w[-1] == "="})
        except TypeError:
            taken = str(takes)
        else:
            return ""
    return f"must accept ({form}), but accepts {taken}; correct its parameters"


def _refused_methods(protocol: type, part: type) -> str:
    """Check that a class defines the methods of `protocol` with the same arguments. The function returns an empty
    string if the class conforms, and otherwise an error text with the wrong methods and a remedy."""
    if unwritten := sorted(getattr(part, "__abstractmethods__", ())):
        return f"has no {', '.join(f'{name}()' for name in unwritten)} of its own; define it, or correct its spelling"
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
            return f"{name}() must accept {form}, but accepts {takes}; correct its parameters"
    return ""


def _without_types(function: Callable[..., object]) -> Signature:
    """Return the parameters of a method, without `self` and annotations."""
    parameters = list(signature(function).parameters.values())[1:]
    return Signature([each.replace(annotation=Parameter.empty) for each in parameters])


def refused_call(protocol: type, part: object) -> str:
    """Check that a function among the facts of a part accepts the arguments of `protocol`. Return an empty string if
    the function accepts the arguments, and a description of the problem otherwise."""
    return _refused(form, part) if (form := _call_form(protocol)) else ""


class Registry(Collection[str], Generic[P, F, K]):
    """Mapping from names to parts (interchangeable components) of one kind, in order of registration.

    Args:
        flag: the flag that selects a part on the command line. Error messages name this flag.
        facts: function that creates the facts (properties) of a part from the keyword arguments of `register`.
        protocol: the Protocol that all parts implement. Each part must accept the arguments of the Protocol's
            `__call__`, and have the other members of the Protocol. If `protocol` is a class but not a Protocol, each
            part must be an instance of it.
        makes: the Protocol of the objects that a part creates when it is called. If a part is a class, it must have the
            members of this Protocol, and its methods must accept the same arguments.
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
        """Add a part. Pass the part as an argument, or use `register` as a decorator. A string "module:attribute" is
        imported on first use.

        The method raises ValueError if the part does not match the Protocol of the registry, or if the name is already
        registered; the message then contains the file and line of both registrations.
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
        """Register a substitute for the part `name`. `build` calls the substitute instead of the part if `when(*args)`
        is true. `part` is a string "module:attribute". A substitute is a different implementation of the same function
        with the same parameters. Configurations still contain `name`, not the substitute.
        """
        self._substitutes.setdefault(name, []).append((part, when))

    def build(self, name: str, *args: Any) -> Any:
        """Call the part `name` with `args`, and return the result. If the condition `when` of one or more substitutes
        is true for `args`, call the first of these substitutes instead."""
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
        """Return the part `name`, and import it if necessary. The method raises ValueError if the name is not
        registered."""
        entry = self._entry(name)
        if isinstance(entry.part, str):
            part = imported(entry.part)
            self._check(name, part)
            entry = self._entries[name] = replace(entry, part=part)
        return cast("P", entry.part)

    def _check(self, name: str, part: object) -> None:
        """Raise ValueError if a part does not match the Protocol of the registry."""
        if unwritten := _unwritten(part):
            raise ValueError(f"{self.flag} {name}: has no {unwritten} of its own; define it, or correct its spelling")
        if not isinstance(part, self._class):
            rule = f"must be a {self._class.__name__}, but is a {type(part).__name__}"
            raise ValueError(f"{self.flag} {name}: {rule}; register an instance")
        made = self._makes if isinstance(part, type) else None
        wanted = self._members + ([] if made is None else _members(made))
        classes = part.__mro__ if isinstance(part, type) else (part,)
        known = set(dir(part)).union(*(getattr(each, "__annotations__", ()) for each in classes))
        if missing := [attribute for attribute in wanted if attribute not in known and not hasattr(part, attribute)]:
            raise ValueError(
                f"{self.flag} {name}: has no {', '.join(missing)}; derive it from the base class for this flag"
            )
        if self._form is not None and (refused := _refused(self._form, part)):
            raise ValueError(f"{self.flag} {name}: {refused}")
        if made is not None and isinstance(part, type) and (refused := _refused_methods(made, part)):
            raise ValueError(f"{self.flag} {name}: {refused}")

    def facts(self, name: str) -> F:
        """Return the facts (properties) of a part without importing the part. The method raises ValueError if the name
        is not registered."""
        return self._entry(name).facts

    def wanted(self, *args: Any) -> list[str]:
        """Return the names of the parts that a run uses. A run uses a part if the part's fact `when` returns True for
        `args`."""
        return [name for name, entry in self._entries.items() if entry.facts.when(*args)]  # type: ignore[attr-defined]

    def chosen(self, *args: Any) -> str | None:
        """Return the first name that `wanted(*args)` returns, or None if it returns no name. Call this method only if a
        run uses at most one part of the registry's kind."""
        return next(iter(self.wanted(*args)), None)

    def where(self, name: str) -> str:
        """Return the file and line of a part's registration."""
        return self._entry(name).where

    def _entry(self, name: str) -> _Entry[F]:
        if name not in self._entries:
            near = get_close_matches(name, self._entries, n=1)
            remedy = f"nearest: {near[0]}, or" if near else "choose one of them, or"
            raise ValueError(
                f"{self.flag} {name}: must be one of {', '.join(self)}; {remedy} give the --extension that registers it"
            )
        return self._entries[name]
