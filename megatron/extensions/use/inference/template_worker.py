"""Process that renders a chat template, with time and memory limits.

A template is read from the tokenizer files, which may come from an untrusted source. Jinja's sandbox protects the
interpreter, but it limits neither the run time of nested loops nor the length of strings that a template doubles
repeatedly. Compiling a template may already create such strings. The process imports neither torch nor this package.
The first input line of the process contains the template, and each further line contains the values for a rendering.
The process answers each input line with a line of JSON.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Template

SECONDS = 10.0
"""Maximum time in seconds for rendering a chat template. Typical templates take milliseconds."""

MEMORY = 1 << 30
"""Limit on the address space of the process, in bytes."""


class TemplateWorker:
    """Process that renders one chat template. If the process has ended, the next call of `render` restarts it."""

    def __init__(self, source: str) -> None:
        self._source, self._lock = source, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def compile(self) -> dict[str, object]:
        """Start the process. Return an empty dict if the template is valid. If the template is invalid, return a dict
        with the line number (`line`) and the description (`wrong`) of the error. Raises ValueError if a limit is
        exceeded."""
        with self._lock:
            return self._start()

    def render(self, values: dict[str, object]) -> dict[str, object]:
        """Render the template. Return a dict with the rendered text (`text`). If the template refuses the values,
        return a dict with the reason (`wrong`).

        Raises ValueError if a limit is exceeded."""
        with self._lock:
            if self._process is None:
                self._start()
            return self._ask(values)

    def _start(self) -> dict[str, object]:
        command = [sys.executable, "-P", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        weakref.finalize(self, _end, self._process)
        return self._ask(self._source)

    def _ask(self, question: object) -> dict[str, object]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        answer, until = bytearray(), time.monotonic() + SECONDS
        try:
            view = memoryview(json.dumps(question).encode() + b"\n")
            while view:
                view = view[process.stdin.write(view) :]
            while not answer.endswith(b"\n"):
                if not select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                    raise ValueError(f"takes more than {SECONDS:g} seconds; does it have nested loops?")
                if not (part := os.read(process.stdout.fileno(), 1 << 20)):
                    raise ValueError("has ended its process, perhaps because of the memory limit")
                answer += part
        except (OSError, ValueError) as error:
            _end(process)
            self._process = None
            if isinstance(error, OSError):
                raise ValueError("has ended its process") from None
            raise
        found: dict[str, object] = json.loads(answer)
        return found


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _compiled(source: str) -> Template:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
    environment.filters["tojson"] = _to_json
    return environment.from_string(source)


def main() -> None:
    from jinja2 import TemplateSyntaxError

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    # Ignore SIGINT, because the main program handles it and then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    template: Template | None = None
    for line in sys.stdin.buffer:
        # If rendering takes too long and the main program does not end this process, SIGPROF ends it.
        signal.setitimer(signal.ITIMER_PROF, SECONDS + 5)
        try:
            question, answer = json.loads(line), dict[str, object]()
            if template is None:
                template = _compiled(question)
            else:
                answer = {"text": template.render(**question)}
        except TemplateSyntaxError as error:
            answer = {"line": error.lineno, "wrong": error.message}
        except MemoryError:
            answer = {"line": 0, "wrong": f"it needs more than {MEMORY >> 20} MiB of memory"}
        except Exception as error:
            answer = {"line": 0, "wrong": str(error) or type(error).__name__}
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
