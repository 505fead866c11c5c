"""Runs of two processes that are told to stop, at the moments at which that is hardest.

python -m tests.faults.signals [CASE ...]      # prints a table of the outcomes
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tests.faults.runs import MODEL, ROOT
from tests.limits import HANG


@dataclass
class World:
    """Two ranks, each a child of this process, started as srun starts tasks, so that their exit codes are seen."""

    folder: Path
    flags: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    ranks: int = 2

    def __enter__(self) -> World:
        self.save = self.folder / "save"
        environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "FAULT": "none:0:0"}
        environ |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": str(time.time_ns() % 500)}
        environ |= {"SLURM_STEP_NUM_TASKS": str(self.ranks), "SLURM_STEP_NODELIST": "localhost"}
        command = [sys.executable, "tests/faults/broken_pretrain.py", *MODEL, "--pp", "1", "--save", str(self.save)]
        self.screen = (self.folder / "screen").open("w+")
        self.processes = []
        for rank in range(self.ranks):
            own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
            process = subprocess.Popen(
                [*command, *self.flags],
                cwd=ROOT,
                env=environ | own | self.environ,
                stdout=self.screen,
                stderr=self.screen,
            )
            self.processes.append(process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.screen.close()

    @property
    def text(self) -> str:
        return (self.folder / "screen").read_text()

    def wait_for(self, said: Callable[[], object] | str) -> None:
        """Until something is true, or on the screen."""
        deadline = time.monotonic() + HANG
        while not (said in self.text if isinstance(said, str) else said()):
            assert time.monotonic() < deadline, self.text
            assert any(process.poll() is None for process in self.processes), self.text
            time.sleep(0.1)

    def send(self, rank: int, number: signal.Signals) -> None:
        self.processes[rank].send_signal(number)

    def codes(self) -> list[int]:
        """The exit codes of all, when all have ended."""
        return [process.wait(timeout=HANG) for process in self.processes]

    @property
    def saved(self) -> int | None:
        """The iteration of the latest checkpoint."""
        path = self.save / "latest_checkpointed_iteration.txt"
        return int(path.read_text()) if path.exists() else None

    @property
    def stopped_at(self) -> int:
        found = re.search(r"exiting at iteration (\d+)", self.text)
        assert found is not None, self.text
        return int(found[1])


def files(folder: Path) -> tuple[list[int], str]:
    """The file `save` saves and the run goes on; `exit` ends it."""
    with World(folder) as world:
        world.wait_for("start-up (s)")
        (world.save / "save").touch()
        world.wait_for(lambda: world.saved is not None)
        first = world.saved
        (world.save / "exit").touch()
        codes = world.codes()
        assert first is not None and world.saved == world.stopped_at > first
        return codes, f"saved at {first}, went on, and ended at {world.saved}"


def evaluation(folder: Path) -> tuple[list[int], str]:
    """A signal on rank 1 while all evaluate."""
    with World(folder, ("--eval-interval", "3", "--eval-iters", "1000000")) as world:
        world.wait_for("start-up (s)")
        time.sleep(2)
        world.send(1, signal.SIGUSR2)
        codes = world.codes()
        assert world.saved == world.stopped_at == 3
        assert "SIGUSR2 on rank 1 of 2" in world.text and "valid loss" not in world.text
        return codes, "the evaluation was broken off, iteration 3 saved"


def during_a_save(folder: Path) -> tuple[list[int], str]:
    """A signal while a checkpoint is written, which takes three seconds longer than it would."""
    with World(folder, ("--save-interval", "2"), {"SLOW": "publish"}) as world:
        world.wait_for("saving checkpoint at iteration 2")
        world.send(0, signal.SIGTERM)
        codes = world.codes()
        assert "saved checkpoint at iteration 2" in world.text
        assert world.saved == world.stopped_at
        return codes, f"the save at 2 was finished, then iteration {world.saved} saved"


def index_building(folder: Path) -> tuple[list[int], str]:
    """A signal on one rank while both build data sets."""
    with World(folder, (), {"SLOW": "data"}) as world:
        world.wait_for("building data")
        world.send(1, signal.SIGINT)
        codes = world.codes()
        assert world.saved is None and "ending before the first step: SIGINT on rank 1 of 2" in world.text
        return codes, "ended at once, nothing to save"


def second_signal(folder: Path) -> tuple[list[int], str]:
    """A second signal on the same rank, in a step that takes a minute."""
    with World(folder, (), {"SLOW": "step"}) as world:
        world.wait_for("in a long step")
        world.send(1, signal.SIGTERM)
        time.sleep(1.5)
        began = time.monotonic()
        world.send(1, signal.SIGTERM)
        codes = world.codes()
        assert world.saved is None and world.text.count("a second signal, SIGTERM") == 1
        return codes, f"ended {time.monotonic() - began:.1f} s after the second, nothing saved"


def job_end(folder: Path) -> tuple[list[int], str]:
    """The end of a SLURM job that is near."""
    end = str(int(time.time()) + 120)
    with World(folder, ("--exit-margin-in-mins", "1"), {"SLURM_JOB_END_TIME": end}) as world:
        codes = world.codes()
        assert world.saved == world.stopped_at and "the SLURM job ends in 1.0 minutes" in world.text
        return codes, f"ended {int(end) - time.time():.0f} s before the job's end, iteration {world.saved} saved"


def duration(folder: Path) -> tuple[list[int], str]:
    """The time that the run was given."""
    with World(folder, ("--exit-duration-in-mins", "0.5")) as world:
        codes = world.codes()
        assert world.saved == world.stopped_at and "--exit-duration-in-mins 0.5" in world.text
        return codes, f"iteration {world.saved} saved"


def interrupt(folder: Path) -> tuple[list[int], str]:
    """Ctrl-C: SIGINT to torchrun and all its processes at once."""
    screen = (folder / "screen").open("w+")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["tests/faults/broken_pretrain.py", *MODEL, "--pp", "1", "--save", str(folder / "save")]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "FAULT": "none:0:0"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=screen, stderr=screen, start_new_session=True
    ) as process:
        while "start-up (s)" not in (folder / "screen").read_text():
            assert process.poll() is None, (folder / "screen").read_text()
            time.sleep(0.1)
        time.sleep(1)
        os.killpg(process.pid, signal.SIGINT)
        code = process.wait(timeout=HANG)
    text = (folder / "screen").read_text()
    saved = int((folder / "save" / "latest_checkpointed_iteration.txt").read_text())
    assert f"exiting at iteration {saved}: SIGINT on rank" in text, text
    return [code], f"iteration {saved} saved; the code is torchrun's"


CASES = {
    "files": files,
    "evaluation": evaluation,
    "during_a_save": during_a_save,
    "index_building": index_building,
    "second_signal": second_signal,
    "job_end": job_end,
    "duration": duration,
    "interrupt": interrupt,
}


def main(names: list[str]) -> None:
    print("| what | exit codes of the ranks | what came of it |\n|---|---|---|")
    for name in names or CASES:
        with tempfile.TemporaryDirectory() as folder:
            codes, outcome = CASES[name](Path(folder))
            what = (CASES[name].__doc__ or "").strip().rstrip(".")
            print(f"| {what} | {', '.join(map(str, codes))} | {outcome} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
