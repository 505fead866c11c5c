"""Print the flags of a Megatron-LM checkout's argument parser as JSON. Run this file as a separate program.

    python tools/common/megatron_parser.py ~/Megatron-LM

The program executes the code of the checkout, so its output also contains flags that the checkout generates from
dataclasses. A missing module, such as transformer_engine, is replaced with a module in which every attribute is an
empty class, because the parser needs only names.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType


class _Absent(type):
    """Metaclass of placeholder classes, which replace all attributes of missing modules. Each attribute of a
    placeholder class is another placeholder class."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name, (), {})


class StandIn(ModuleType):
    """Placeholder for a module that is not installed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name, (), {})


def parser_of(checkout: Path) -> argparse.ArgumentParser:
    """Return the argument parser of a Megatron-LM checkout. Raises ImportError if a module of the checkout itself is
    missing."""
    sys.path[0] = str(checkout)  # This entry was the folder of this file.
    stand_ins: dict[str, StandIn] = {}
    while True:
        for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
            del sys.modules[name]
        package = ModuleType("megatron")  # This module takes precedence over an installed package `megatron`.
        package.__path__ = [str(checkout / "megatron")]
        sys.modules.update({"megatron": package, **stand_ins})
        try:
            arguments = importlib.import_module("megatron.training.arguments")
            parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
            arguments.add_megatron_arguments(parser)
            return parser
        except ModuleNotFoundError as error:
            if error.name is None or error.name in stand_ins or error.name.partition(".")[0] == "megatron":
                raise
            stand_ins[error.name] = StandIn(error.name)


def described(action: argparse.Action) -> list[dict[str, object]]:
    """Return one description for each spelling of a flag. The keys are the columns of flags_of_head.txt."""
    count = 1 if action.nargs is None else action.nargs
    kind = getattr(action.type, "__name__", "str") if count != 0 else "switch"
    choices = [str(getattr(choice, "name", choice)) for choice in action.choices or ()]
    own = {"default": repr(action.default), "type": kind, "count": str(count), "choices": choices}
    return [{"name": name, **own} for name in action.option_strings]


if __name__ == "__main__":
    found = parser_of(Path(sys.argv[1]).expanduser().resolve())
    print(json.dumps([each for action in found._actions for each in described(action)]))
