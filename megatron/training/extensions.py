"""Load extensions (--extension), which are users' Python files that register components and flags. This module also
contains the registry of callbacks. This module itself does not import torch.

An extension is imported before flags are parsed, so that its registrations appear in `--help` and are validated like
built-in ones. The saved configuration and checkpoints contain the extension's path. A path in a saved file alone does
not make the extension run. The command line must also name the extension, unless the file belongs to one of the user's
own runs (`code_record`).
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePath
from typing import Protocol, TypeVar

from megatron.core.registry import Registry
from megatron.training.config.code_record import code_exists, standing
from megatron.training.config.flags import ExtensionSection, Resolve, Rules, add_section
from megatron.training.config.problem import Problem, path_rule
from megatron.training.config.run_config import RunConfig

__all__ = ["CALLBACKS", "ExtensionError", "Problem", "extension_flags", "load_extensions"]

LIBRARY = str(Path(__file__).resolve().parents[1])

T = TypeVar("T")


def _always(config: RunConfig) -> bool:
    return True


@dataclass(frozen=True)
class Stored:
    """Number format and device of a callback's states."""

    dtype: str | None = None
    """Name of the torch dtype of the states, or None for the dtype of the main parameters."""

    on_host: bool = False
    """True if the states are stored in host memory, False if they are stored on the device of the parameters."""


def _as_main_parameters(config: RunConfig) -> Stored:
    return Stored()


@dataclass(frozen=True)
class CallbackFacts:
    """Properties of a callback class that are known before the class is imported."""

    when: Callable[[RunConfig], bool] = _always
    """Function that returns True if a run with the given configuration uses the callback. The callback is not imported
    if the function returns False."""

    evaluates: str = ""
    """Name of the flag that makes a task of the callback evaluate the model. A run with this flag and --skip-train
    needs no data sets."""

    states: tuple[str, ...] | Callable[[RunConfig], tuple[str, ...]] = ()
    """Names of the callback's states, or a function that returns these names for a run's configuration.

    A state has one number per element of the trained parameters, stored in the format and on the device that `stored`
    returns. The initial value of a state is zero. States are included in plans, sharded like the optimizer's states,
    and saved in checkpoints (`Callback.states`).
    """

    stored: Callable[[RunConfig], Stored] = _as_main_parameters
    """Function that returns the number format and device of the states. By default, states have the dtype of the main
    parameters, and are stored on the device of the parameters."""

    def states_in(self, config: RunConfig) -> tuple[str, ...]:
        """Return the names of the states that the callback keeps in a run with this configuration."""
        return self.states(config) if callable(self.states) else self.states


class CallbackClass(Protocol):
    """Subclass of `megatron.training.hooks.Callback`."""

    def __call__(self, config: RunConfig) -> object: ...


CALLBACKS = Registry("callback", CallbackFacts, protocol=CallbackClass)
"""Callbacks that extensions add to runs:

    @CALLBACKS.register("uploads", when=lambda config: config.checkpoint.save is not None)
    class Uploads(Callback):
        def on_checkpoint(self, run): ...
"""


class ExtensionError(ValueError):
    """Raised if an extension cannot be used. The message contains the file and the line of the extension."""

    def __init__(self, rule: str, remedy: str = "") -> None:
        super().__init__(f"{rule}; {remedy}" if remedy else rule)
        self.rule, self.remedy = rule, remedy or "correct the extension, or remove --extension"


def extension_flags(
    title: str,
    may_change: bool = False,
    rules: Rules | str | None = None,
    resolve: Resolve | str | None = None,
    reads: Resolve | str | None = None,
    part_of: str | None = None,
    always: bool = False,
) -> Callable[[type[T]], type[T]]:
    """Decorator that turns the fields of a frozen dataclass into flags. The string below a field is the flag's help
    text.

    Registered components read the flags' values with `config.options(Cls)`, where `Cls` is the dataclass. The functions
    `rules`, `resolve` and `reads` may also be given as "module:function".
    Args:
        title: Title of the flags in `--help`.
        may_change: True if a run may load a checkpoint that has different values of these flags, for example because
            the flags belong to a callback, a metric or a learning rate.
        rules: `rules(config, world_size)` yields a `Problem` for each wrong value; `config` is the whole `RunConfig`.
            `rules` is imported and called only if one of the dataclass's flags is set.
        resolve: `resolve(config)` returns the configuration, with other flags set to the values that these flags
            determine.
        reads: `reads(config)` returns the configuration with values that it reads from files named by these flags. The
            function raises ValueError with the flag's name if a file cannot be read.
        part_of: "model" if the flags describe a model. A run reads the values of model flags from the checkpoint that
            it loads, as it does for built-in model flags. "data" if the flags select training data. None for other
            flags.
        always: True to call `rules` in every run, even if none of these flags is set. Use `always` if the flags belong
            to a component that other flags select.
    """

    def add(cls: type[T]) -> type[T]:
        add_section(title, ExtensionSection(cls, may_change, rules, always, resolve, reads, part_of))
        return cls

    return add


def load_extensions(names: Sequence[str]) -> tuple[str, ...]:
    """Import each extension once per process. Each name is either the path of a .py file, or a module name such as
    `package.module`. Return the names with absolute paths. Raises ExtensionError if an extension cannot be imported.
    """
    return tuple(dict.fromkeys(_load(name) for name in names))


def loaded_extensions() -> tuple[str, ...]:
    """Return the names of all extensions that this process has imported, with absolute paths."""
    return tuple(_LOADED)


def load_saved_extensions(payload: Mapping[str, object], source: PurePath) -> None:
    """Import the extensions with which the checkpoint `source` was saved, if `may_load` permits them. Raises ValueError
    if an extension is not permitted or cannot be imported."""
    config = payload.get("config")
    section = config.get("extensions") if isinstance(config, Mapping) else None
    names = (section.get("extension") if isinstance(section, Mapping) else None) or ()
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"checkpoint {source} is damaged: its list of extensions is {f'{names!r}'[:40]}")
    given = [name for name in _LOADED if name not in names]
    others = [name for name in names if name not in _LOADED]
    load_extensions(may_load(others, given, source, f"checkpoint {source}"))


def may_load(names: Sequence[str], given: Sequence[str], source: PurePath, shown: str) -> list[str]:
    """Return the extensions in `names` that may be imported.

    An extension is permitted if one of the user's runs has recorded its code for the folder of `source`. An extension
    on the command line (`given`) replaces an extension in the file if the two have the same file name, or if the
    extension in the file is missing on disk. Raises ExtensionError if some named extensions are neither permitted nor
    replaced. The error message lists each such extension, with the flag that permits it.

    Args:
        names: Extensions that the file names.
        given: Extensions on the command line.
        source: Checkpoint or other file in which the extensions are named.
        shown: Name for `source` to use in messages.
    """
    recorded = []
    refused = []
    missing = []
    elsewhere = list(given)
    for name in names:
        moved = next((each for each in elsewhere if Path(each).name == Path(name).name), None)
        if moved is not None:
            elsewhere.remove(moved)
        elif not code_exists(name):
            missing.append(name)
        elif (found := standing(source, name)) == "recorded":
            recorded.append(name)
        else:
            refused.append(name + CHANGED * (found == "changed"))
    missing = missing[len(elsewhere) :]
    if not refused and not missing:
        return recorded
    several = "s" if len(refused + missing) > 1 else ""
    rule = f"{shown} names the extension{several} {', '.join(refused + missing)}; "
    remedies = []
    if refused:
        flags = [f"--extension {name.removesuffix(CHANGED)}" for name in refused]
        remedies.append(f"read {'them' if len(refused) > 1 else 'it'}, then add {' '.join(flags)}")
    if missing:
        gone = f"there is no such file or module as {' and '.join(missing)}"
        remedies.append(f"{gone}: if it was moved or renamed, give --extension NEWPATH; a module needs its PYTHONPATH")
    raise ExtensionError(f"{rule}extension code runs only if the command line names the extension", "; ".join(remedies))


CHANGED = " (changed since that run)"

_LOADED: dict[str, str] = {}
"""Dict from the name of each imported extension to its module name. The name of an extension in a .py file is the
absolute path."""


def _load(name: str) -> str:
    path = Path(name).expanduser().resolve() if name.endswith(".py") else None
    whole = name if path is None else str(path)
    if whole in _LOADED:
        return whole
    if path is not None and (broken := path_rule("local", name)) is not None:
        raise ExtensionError(f"{name}: {broken[0]}", broken[1])
    if path is not None and not path.is_file():
        what = "is a folder" if path.is_dir() else "there is no such file"
        raise ExtensionError(f"{name}: {what}" + ("" if Path(name).is_absolute() else f", relative to {Path.cwd()}"))
    if path is None and Path(name).expanduser().is_dir() and not name.isidentifier():
        raise ExtensionError(
            f"{name}: is a folder", "put its parent on PYTHONPATH and name the package, or name one of its files"
        )
    if path is None and (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # like python -m
    try:
        _LOADED[whole] = import_module(name).__name__ if path is None else _import_file(path)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ExtensionError(_what_failed(whole, error)) from error
    return whole


def _import_file(path: Path) -> str:
    name = f"extension_{path.stem}"
    while name in sys.modules:  # an extension with this file name exists
        name += "_"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return name


def problem_in_extension(error: BaseException) -> Problem | None:
    """Convert an error from the code of an extension to a problem with the text `file:line: Kind: message`. The error,
    or one of its causes, must have been raised by the extension after its import. Return None for any other error."""
    if (found := place_in_extension(error)) is None:
        return None
    cause, place = found
    rule = f"{place}: {_kind_and_message(cause)}"
    return Problem("--extension", None, rule, "correct the extension, or remove --extension")


def place_in_extension(error: BaseException) -> tuple[BaseException, str] | None:
    """Find the line of an extension that raised `error` or one of the causes of `error`. Return the raised exception,
    and the line as `file:line`. Return None if no extension raised one of these exceptions."""
    own = tuple(_own_code())
    cause: BaseException | None = error
    while cause is not None:
        for frame in reversed(traceback.extract_tb(cause.__traceback__)):
            if frame.filename.startswith(own) and not frame.filename.startswith(LIBRARY):
                return cause, f"{frame.filename}:{frame.lineno}"
        cause = cause.__cause__
    return None


def _own_code() -> Iterator[str]:
    """Yield the file of each imported extension, or the folders of its package."""
    for name in _LOADED.values():
        module = sys.modules[name.partition(".")[0]]
        folders = [f"{folder}/" for folder in getattr(module, "__path__", ())]
        yield from folders or [str(module.__file__)]


def _kind_and_message(error: BaseException) -> str:
    return f"{type(error).__name__}: " + (" ".join(str(error).split()) or "no message")


def _what_failed(name: str, error: BaseException) -> str:
    """Describe an error as `file:line: Kind: message`. If the traceback contains several lines of the user's code, the
    innermost of these lines is used."""
    what = _kind_and_message(error)
    if isinstance(error, SystemExit):
        what = f"the extension ends the process while it is imported ({what})"
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", LIBRARY)) and "importlib" not in frame.filename
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {what}" if frames else f"{name}: {what}"
