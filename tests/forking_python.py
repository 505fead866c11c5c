"""A `python` and a `torchrun` for the commands of a shell, whose programs are forked from this process.

Programs of the repository skip the two seconds of importing torch, once a rank. What they do else is the same: flags,
files, both outputs, exit code. All other commands (`python -m pytest`, `python -c`) are Python's own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.forked import LAUNCHER, forked_ranks, join, run_program
from tests.limits import HANG

CLIENT = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect(sys.argv[1])
    request = {"program": sys.argv[2], "argv": sys.argv[3:], "cwd": os.getcwd(), "environ": dict(os.environ)}
    asked.sendall(json.dumps(request).encode())
    asked.shutdown(socket.SHUT_WR)
    with asked.makefile() as answer:
        out, err, code = json.load(answer)
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""
"""Sends its command to the socket and prints the answer. It imports nothing large."""


def _scripts(folder: Path) -> None:
    """`python` and `torchrun` for the front of PATH."""
    client = folder / "client.py"
    client.write_text(CLIENT)
    ask = f'exec "{sys.executable}" -S -E "{client}" "{folder}/socket"'
    forked = f"""pretrain_gpt.py\\ * | tools/*.py\\ *) {ask} python "$@" ;;"""
    launched = f"""-m\\ torch.distributed.run\\ --standalone\\ *) shift 3; {ask} torchrun "$@" ;;"""
    bodies = {
        "python": f'case "$* " in\n{forked}\n{launched}\nesac\nexec "{sys.executable}" "$@"',
        "torchrun": f'{ask} torchrun "$@"',
    }
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)


def run_script(script: str, cwd: Path, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a bash script in the folder `cwd` with the variables `environ`, one program at a time. It must not start
    programs in the background, nor feed them input."""
    with tempfile.TemporaryDirectory(prefix="forking-") as name, socket.socket(socket.AF_UNIX) as asked:
        folder = Path(name)
        _scripts(folder)
        asked.bind(f"{folder}/socket")
        asked.listen()
        asked.settimeout(0.05)
        environ = {**environ, "PATH": f"{folder}:{environ['PATH']}", "PYTHON": f"{folder}/python"}
        out, err = folder / "out", folder / "err"
        with out.open("w") as out_file, err.open("w") as err_file:
            shell = subprocess.Popen(["bash", "-c", script], cwd=cwd, env=environ, stdout=out_file, stderr=err_file)
        try:
            for _ in _until_ended(shell):
                _answer(asked)
        finally:
            shell.kill()
            shell.wait()
        return subprocess.CompletedProcess(script, shell.returncode, out.read_text(), err.read_text())


def _run_ranks(argv: list[str], cwd: Path, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """What `torchrun --nproc-per-node N pretrain_gpt.py FLAGS` does, but for restarts."""
    flag, processes, script, *flags = argv
    assert (flag, script) == ("--nproc-per-node", "pretrain_gpt.py"), argv

    def prepare(rank: int) -> None:
        os.environ |= {name: value for name, value in environ.items() if name not in LAUNCHER}
        os.chdir(cwd)

    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        screen = Path(name) / "screen"
        with forked_ranks(int(processes), flags, screen, prepare) as ranks:
            codes = join(ranks)
        return subprocess.CompletedProcess(argv, max(map(abs, codes)), screen.read_text(), "")


def _until_ended(shell: subprocess.Popen[bytes]) -> Iterator[None]:
    turns = 0
    while shell.poll() is None:
        turns += 1
        if turns * 0.05 > HANG:
            raise TimeoutError(f"the commands did not end within {HANG} s")
        yield


def _answer(asked: socket.socket) -> None:
    """Runs the next program that is asked for, if any."""
    try:
        client, _ = asked.accept()
    except TimeoutError:
        return
    with client:
        client.settimeout(HANG)
        with client.makefile() as file:
            request = json.load(file)
        argv, cwd, environ = request["argv"], Path(request["cwd"]), request["environ"]
        if request["program"] == "python":
            done = run_program(*argv, cwd=cwd, **environ)
        else:
            done = _run_ranks(argv, cwd, environ)
        client.sendall(json.dumps([done.stdout, done.stderr, done.returncode]).encode())
