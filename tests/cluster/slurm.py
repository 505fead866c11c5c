"""SLURM cluster on simulated hosts (`tests.cluster.hosts.Box`). The last host is the controller, to which jobs are
submitted. All other hosts are compute nodes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.hosts import ROOT, Box, hosts
from tests.limits import wait_for
from tests.slurm.cluster import ENDED

SCRIPT = ROOT / "tests/slurm/start_slurm.sh"


class SlurmBox:
    """SLURM cluster whose compute nodes are all hosts of `box` except the last one."""

    def __init__(self, box: Box) -> None:
        self.box, self.nodes, self.controller = box, len(box.names) - 1, len(box.names) - 1
        self.folder = box.folder / "slurm"
        self.environ = {"SLURM_CONF": f"{self.folder}/slurm.conf"}
        nodes = " ".join(f"{name}={address}" for name, address in list(zip(box.names, box.addresses, strict=True))[:-1])
        self._run(self.controller, "start", ADDRESS=box.addresses[-1], NODES=nodes)
        for node in range(self.nodes):
            self._run(node, "node")
        self._run(self.controller, "await")

    def _run(self, host: int, command: str, **environ: str) -> None:
        self.box.run(host, "bash", SCRIPT, command, self.folder, **environ)

    def command(self, *words: object) -> str:
        """Run a SLURM command on the controller, and return its output."""
        return self.box.run(self.controller, *words, **self.environ)

    def submit(self, folder: Path, *command: object, nodes: int = 2, gpus: int = 2, **environ: str) -> str:
        """Submit scripts/train_gpt_slurm.sh with a command and return the job's id. The job's output is written to
        FOLDER/log, and the output of node 1 to FOLDER/logs/node-1.log."""
        folder.mkdir()
        words = ["sbatch", "--parsable", f"--nodes={nodes}", "--gpus-per-node=0", "--cpus-per-task=2", "--time=20"]
        words += ["--oversubscribe", f"--output={folder}/log", "scripts/train_gpt_slurm.sh", *map(str, command)]
        inside = {"PYTHON": sys.executable, "GPUS_PER_NODE": str(gpus), "LOG_DIR": f"{folder}/logs", "REPO": str(ROOT)}
        started = self.box.run(self.controller, *words, **self.environ, **(inside | environ))
        return started.split()[-1]

    def ended(self, job: str) -> dict[str, str]:
        """Wait until a job leaves the queue, and return SLURM's record of the job."""
        wait_for(lambda: self._fields(job)["JobState"] in ENDED)
        return self._fields(job)

    def _fields(self, job: str) -> dict[str, str]:
        words = self.command("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


@contextmanager
def slurm_box(nodes: int) -> Iterator[SlurmBox]:
    """Yield a SLURM cluster with `nodes` compute nodes and one host for the controller."""
    with hosts(nodes + 1) as box:
        yield SlurmBox(box)
