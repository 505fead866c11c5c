"""Training on two hosts gives the same result as training in one process. If the hosts share no disk, each host builds
its index files once, and each host loads a checkpoint from a complete local copy. If a run needs a shared folder or the
same data on each host but does not have it, the run is refused at startup."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron.extensions.operate.resilience import save_folder
from tests.cluster.forked import run_on_hosts
from tests.cluster.hosts import hosts, missing
from tests.corpus import write_documents
from tests.faults.test_index_races import write_data
from tests.forked import run_forked
from tests.tiny import TINY

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

MODEL = f"{TINY} --fp64 --lr 1e-3 --global-batch-size 8 --log-interval 1 --hidden-dropout 0.1".split()


def trained(folder: Path) -> tuple[list[float], list[float]]:
    """Return the losses and gradient norms of each step."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["lm_loss"] for record in records], [record["grad_norm"] for record in records]


def test_training_on_two_hosts_equals_one_process(tmp_path: Path) -> None:
    flags = [*MODEL, "--tp", "2", "--pp", "2", "--save", str(tmp_path / "hosts")]
    with hosts(2, "100mbit") as box:
        run_on_hosts(box, 2, flags, tmp_path)
    run_forked(1, [*MODEL, "--save", str(tmp_path / "one")], tmp_path / "screen")
    alone, together = trained(tmp_path / "one"), trained(tmp_path / "hosts")
    assert len(alone[0]) == 4
    assert together[0] == pytest.approx(alone[0], rel=1e-9) and together[1] == pytest.approx(alone[1], rel=1e-9)


FLAGS = [flag for flag in MODEL if flag != "--mock-data"] + "--vocab-size 64 --seq-length 16 --split 90,5,5".split()


def write_other_data(prefix: Path) -> None:
    write_documents(prefix, map(np.arange, range(20, 40)))


def test_hosts_without_a_shared_disk_train_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.setattr(save_folder, "PATIENCE", 0.5)  # short, because the simulated hosts do not cache directories
    text = write_data(tmp_path / "alone" / "text")
    run_forked(1, [*FLAGS, "--data-path", str(text), "--save", str(tmp_path / "one")], tmp_path / "screen")
    disk, shared = tmp_path / "disk", tmp_path / "shared"
    data = ["--data-path", f"{disk}/data/text"]
    with hosts(2, disk=disk) as box:

        def run(*flags: str, code: int = 0) -> str:
            folder = tmp_path / f"run{len(list(tmp_path.glob('run*')))}"
            folder.mkdir()
            return "\n".join(run_on_hosts(box, 1, [*FLAGS, *data, *flags], folder, code))

        shutil.copytree(text.parent, box.disk_of(0) / "data", ignore=shutil.ignore_patterns("cache"))
        (box.disk_of(1) / "data").mkdir()
        write_other_data(box.disk_of(1) / "data/text")
        assert "not the same on all hosts: rank 1 (on host1) found different data from rank 0" in run(code=1)

        shutil.rmtree(box.disk_of(1) / "data")
        shutil.copytree(text.parent, box.disk_of(1) / "data", ignore=shutil.ignore_patterns("cache"))
        shutil.rmtree(box.disk_of(0) / "data/cache")
        run("--save", str(shared))
        assert trained(shared)[0] == pytest.approx(trained(tmp_path / "one")[0], rel=1e-9)
        built = [sorted(path.name for path in (box.disk_of(host) / "data/cache").rglob("*.npy")) for host in range(2)]
        assert built[0] == built[1] and len(built[0]) == 9  # there are three index files for each of the three splits

        said = run("--save", f"{disk}/save", code=1)
        assert f"--save {disk}/save is not the same folder for all ranks" in said and "rank 1 (on host1) cannot" in said
        assert "step time" not in said

        if not pytestconfig.getoption("--whole"):
            return
        more = ("--load", f"{disk}/load", "--finetune")
        shutil.copytree(shared, box.disk_of(1) / "load")
        assert "but checkpoints exist there for rank 1 (on host1)" in run(*more, code=1)
        (box.disk_of(1) / "load").rename(box.disk_of(0) / "load")
        assert f"in {disk}/load are not there for rank 1 (on host1)" in run(*more, code=1)
        shutil.copytree(shared, box.disk_of(1) / "load")
        assert "iteration        4/       4" in run(*more)
