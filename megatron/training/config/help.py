"""Build the `--help` text from the string below each field. This module does not import torch."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Collection, Sequence
from functools import cache

from megatron.core.config.flag_spec import Section
from megatron.core.registry import Registry
from megatron.training.config.flags import Flag, all_flags, sections

SECTION_TITLES = {
    "parallel": "parallelism and precision",
    "model": "model",
    "optimizer": "optimizer, learning rate and loss scale",
    "ddp": "data parallelism",
    "data": "data",
    "tokenizer": "tokenizer",
    "training": "batch size and length",
    "checks": "skipped and failing steps",
    "logging": "logging",
    "checkpoint": "checkpoints",
    "extensions": "extensions",
}


def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring of each field, including inherited fields; empty if the source is not available."""
    return {name: text for base in reversed(cls.__mro__[:-1]) for name, text in _own_docs(base).items()}


@cache
def _own_docs(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
    except OSError:
        return {}
    docs: dict[str, str] = {}
    for node in (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == cls.__name__):
        for field, below in zip(node.body, node.body[1:], strict=False):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                docs[field.target.id] = " ".join(str(below.value.value).split())  # type: ignore[attr-defined]
    return docs


USAGE = (
    "usage: pretrain_gpt.py [--config FILE] [flags]",
    "",
    "--config reads flags from a YAML file, without their dashes; flags on the command line override it.",
    "A switch --x is turned off by --no-x.",
)


def help_text(
    extra: Sequence[tuple[str, str]], required: Collection[str], words: Sequence[str] = (), width: int = 110
) -> str:
    """Return the help text of flags, grouped by section, with default values.

    If `words` is empty, the text lists only the flags that a first run needs. The word "all" selects every flag. If the
    words are the title of a section, the flags of this section are selected. Otherwise, the flags whose name or help
    text contains all the words are selected.

    Args:
        extra: Pairs (spelling, help text) of options that are not configuration fields.
        required: Names of fields that have no default.
        words: Words that the user typed after --help.
        width: Line width in characters.
    """
    asked = " ".join(words).lower()
    titles = {section: SECTION_TITLES.get(section, section) for section in sections()}
    chosen = [section for section, title in titles.items() if asked in ("all", title.lower())]
    lines = [*USAGE, "", "command line:"] if asked in ("", "all") else []
    for spelling, text in extra if lines else ():
        lines += _entry(spelling, text, width)
    for section in chosen or titles:
        flags = [flag for flag in all_flags() if flag.section == section and (asked or flag.spec.first_run)]
        entries = [_about(flag, sections()[section], required) for flag in flags]
        if not chosen:
            entries = [entry for entry in entries if all(word.lower() in " ".join(entry).lower() for word in words)]
        if entries:
            lines += ["", f"{titles[section]}:"]
        for usage, text in entries:
            lines += _entry(usage, text, width)
    if not asked:
        lines += [
            "",
            f"These are the flags of a first run. --help all prints all {len(all_flags())}, --help WORD ... those",
            "about these words, and --help GROUP the flags of a group:",
            *textwrap.wrap(
                "; ".join(titles.values()), width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
            ),
        ]
    lines = lines or [f"no flag is about {' and '.join(words)}; --help all prints all"]
    return "\n".join(lines).lstrip("\n") + "\n"


def _about(flag: Flag, cls: type[Section], required: Collection[str]) -> tuple[str, str]:
    """Return the spelling of a flag and its help text, which includes descriptions of the flag's choices."""
    default = " (required)" if flag.field in required else _default(flag)
    text, choices = field_docs(cls).get(flag.field, ""), flag.spec.choices
    if isinstance(choices, Registry):
        told = ((name, getattr(choices.facts(name), "about", "")) for name in choices)
        text += "".join(f" {name}: {about}." for name, about in told if about)
    return _usage(flag), text + default


def _usage(flag: Flag) -> str:
    if flag.kind is bool:
        value = ""
    elif flag.spec.choices:
        value = " {" + ",".join(flag.spec.choices) + "}"
    else:
        value = f" {flag.metavar}" + (" ..." if flag.spec.many else "")
    return ", ".join(flag.shown) + value


def _default(flag: Flag) -> str:
    if flag.kind is bool:
        return " (default: on)" if flag.default and not flag.spec.name else ""
    return "" if flag.default is None else f" (default: {flag.default})"


def _entry(usage: str, text: str, width: int) -> list[str]:
    indent = " " * 34
    body = textwrap.wrap(text, width - len(indent)) or [""]
    if len(usage) + 4 > len(indent):
        return [f"  {usage}", *(indent + line for line in body)]
    return [f"  {usage}".ljust(len(indent)) + body[0], *(indent + line for line in body[1:])]
