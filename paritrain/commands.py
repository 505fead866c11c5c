"""Entry points of the installed commands, which pyproject.toml lists."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from paritrain import SOURCE


def _prepare() -> None:
    """Make the library importable in programs that this command starts."""
    others = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry not in ("", str(SOURCE))]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SOURCE), *others])


def pretrain() -> int:
    """Run `pretrain_gpt`: train, and return the exit code."""
    _prepare()
    from pretrain_gpt import main

    return main()


def lm_eval() -> None:
    """Run `megatron-lm-eval`: the lm-evaluation-harness command with `--model megatron`."""
    _prepare()
    from megatron.lm_eval_model.__main__ import main

    main()


def tool() -> None:
    """Run the program tools/NAME.py or tools/pictures/NAME.py as the command `megatron-NAME`."""
    _prepare()
    tools = "megatron_tools" if find_spec("megatron_tools") else "tools"  # in a clone, the folder is named tools
    name = Path(sys.argv[0]).stem.removeprefix("megatron-").replace("-", "_")
    here = find_spec(f"{tools}.{name}") is not None
    run_tool = import_module(f"{tools}.common").run_tool
    run_tool(import_module(f"{tools}.{name}" if here else f"{tools}.pictures.{name}").main)
