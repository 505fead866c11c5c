"""Trains a GPT-style language model. `python pretrain_gpt.py --help` lists the flags; see README.md for a first run."""

from __future__ import annotations

import sys

from megatron.training.arguments import command_line
from megatron.training.launch import Launch
from megatron.training.prepare import prepare


def main(argv: list[str] | None = None) -> int:
    """Parses, validates, and trains. Returns the exit code (`megatron.training.exit_codes`)."""
    command = command_line(sys.argv[1:] if argv is None else argv)
    launch = Launch.from_environment()
    config = prepare(command, launch)

    # torch is imported only now: help, validation and plans need no torch.
    from megatron.training.training import pretrain

    return pretrain(config, launch)


if __name__ == "__main__":
    sys.exit(main())
