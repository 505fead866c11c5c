"""Train a GPT-style language model. `python pretrain_gpt.py --help` lists the flags; see README.md for a first run."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

from megatron.extensions import load
from megatron.training.config.arguments import command_line
from megatron.training.config.output_files import drop_output, open_closed_streams, why_unwritten
from megatron.training.config.prepare import prepare
from megatron.training.reliability.child_processes import end_daemons
from megatron.training.reliability.launch import (
    Launch,
    choose_allocators,
    hold_ignored_signals,
    quiet_torch,
    skip_final_collection,
)
from megatron.training.reliability.lossy_output import lossy_output
from megatron.training.reliability.run_status import ExitCode, code_for_launcher, early_end_told
from megatron.training.reliability.starts import start
from megatron.training.reliability.url_credentials import redacted
from megatron.training.reliability.visible_text import visible_output


def main(argv: list[str] | None = None) -> int:
    """Parse and validate the flags, then train. Return the exit code (`megatron.training.reliability.run_status`)."""
    load()
    hold_ignored_signals()
    skip_final_collection()
    closed = open_closed_streams()
    try:
        launch = Launch.from_environment()
    except ValueError as error:
        print(f"This launch cannot run: {error}", file=sys.stderr)
        return 2
    try:
        try:
            with visible_output(), early_end_told(launch):
                config = prepare(command_line(sys.argv[1:] if argv is None else argv, launch), launch)
                sys.argv[1:] = map(redacted, sys.argv[1:])  # dashboards upload sys.argv, so remove credentials
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        drop_output()
        return ExitCode.KILLED + signal.SIGPIPE
    except OSError as error:
        if (why := why_unwritten(error)) is None:
            raise
        drop_output()
        with suppress(OSError):
            print(why, file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # only outside of training: `pretrain` handles SIGINT
        print("Interrupted.", file=sys.stderr)
        return ExitCode.KILLED + signal.SIGINT
    if closed:
        drop_output()
    choose_allocators(os.environ)
    quiet_torch(os.environ)
    # Import torch only now, because help, validation and plans do not need it.
    from megatron.training.training import pretrain

    with lossy_output():
        try:
            return start(config, launch, lambda *world: code_for_launcher(pretrain(*world)))
        finally:
            end_daemons()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ModuleNotFoundError as error:
        if error.name not in ("numpy", "torch"):
            raise
        sys.exit(f"{sys.executable} has no {error.name}: install requirements.txt into it, or use another")
