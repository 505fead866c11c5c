"""Tests of the shell scripts. The tests check the syntax of the scripts, the launch commands that the scripts build,
and the validity of the settings."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron.core.pipeline_parallel.stage_parameters import active_parameters, count_parameters
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve, validate
from tests.apart import run_command
from tests.forked import ROOT, run_program
from tests.limits import HANG

SCRIPTS = sorted(ROOT.glob("scripts/**/*.sh"))


def run(*command: str | Path, code: int | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | environ
    return run_command(command, code, env=environment)


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / ".ci/run"], ids=lambda path: path.name)
def test_scripts_have_valid_syntax(script: Path) -> None:
    run("bash", "-n", script, code=0)


@pytest.mark.parametrize(
    ("linter", "files"),
    [("shellcheck", ["-x", *SCRIPTS, ROOT / ".ci/run"]), ("hadolint", [ROOT / "scripts/Dockerfile"])],
)
def test_scripts_pass_the_linter(linter: str, files: list[str | Path]) -> None:
    program = Path(sys.executable).with_name(linter)
    if not program.exists():
        pytest.skip(f"{linter} is not installed")
    run(program, *files, code=0)


def test_the_lock_file_has_the_versions_of_the_requirements() -> None:
    """The lock file contains the package versions of the container image. torch is not included, because its build
    depends on the machine."""
    pins = {name: set(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / name).read_text(), re.M)) for name in REQUIREMENTS}
    lock = (ROOT / "scripts/requirements.lock").read_text()
    locked = dict(re.findall(r"^([\w.-]+)==(\S+) ", lock, re.M))
    wanted = dict(pins["requirements.txt"]) | {name: dict(pins["requirements-dev.txt"])[name] for name in SERVING}
    del wanted["torch"]
    assert {name.lower(): version for name, version in wanted.items()}.items() <= locked.items()
    assert "torch" not in locked and "://" not in lock
    blocks = re.split(r"^(?=\S)", lock, flags=re.M)[1:]
    assert len(blocks) == len(locked) and all("--hash=sha256:" in block for block in blocks)


REQUIREMENTS, SERVING = ("requirements.txt", "requirements-dev.txt"), ("fastapi", "uvicorn")


def test_kubernetes_pods_follow_the_schema() -> None:
    """There is no schema for the custom resource JobSet, but each job in a JobSet is a Kubernetes job, for which there
    is a schema."""
    validator = pytest.importorskip("kubernetes_validate")
    jobset, policy = yaml.safe_load_all((ROOT / "scripts/kubernetes_jobset.yaml").read_text())
    (hosts,) = jobset["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": hosts["name"]}, **hosts["template"]}
    validator.validate(job, "1.37", strict=True)
    validator.validate(policy, "1.37", strict=True)
    assert policy["spec"]["podSelector"]["matchLabels"] == {
        "jobset.sigs.k8s.io/jobset-name": jobset["metadata"]["name"]
    }
    pod = hosts["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    user = re.search(r"USER (\d+)", (ROOT / "scripts/Dockerfile").read_text())
    assert user is not None and pod["securityContext"]["runAsUser"] == int(user[1])
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    nodes = hosts["template"]["spec"]["completions"]
    assert f"--nnodes={nodes}" in container["args"] and hosts["template"]["spec"]["parallelism"] == nodes
    first = f"--master-addr={jobset['metadata']['name']}-{hosts['name']}-0-0.{jobset['metadata']['name']}"
    assert first in container["args"]
    with pytest.raises(validator.ValidationError):
        validator.validate(job | {"spec": {**job["spec"], "completions": "four"}}, "1.37", strict=True)


@pytest.mark.parametrize(
    ("script", "world_size", "parameters"),
    [
        ("gpt3_175b.sh", 1024, "174,604,836,864"),
        ("train_gpt_single_node.sh", 8, "1,315,819,520"),
        ("mixtral_8x7b.sh", 64, "46,702,792,704, active per token 12,879,925,248"),
    ],
)
def test_settings_match_the_published_model(script: str, world_size: int, parameters: str) -> None:
    """test_docs.py runs these scripts with --dry-run."""
    done = run("bash", f"scripts/{script}", LAUNCH="echo", code=0)
    launched, *flags = shlex.split(done.stdout.splitlines()[-1])
    config = resolve(parse_args(flags), world_size)
    assert launched == "pretrain_gpt.py" and validate(config, world_size) == []
    active = f", active per token {active_parameters(config.model):,}" if config.model.num_experts else ""
    assert f"{count_parameters(config.model).total:,}{active}" == parameters


@pytest.mark.parametrize(
    ("mebibytes", "preset"), [([8188], "8gb"), ([12288, 24564], "24gb"), ([46068], "48gb"), ([81559], "48gb")]
)
def test_one_gpu_takes_the_largest_preset_that_fits(mebibytes: list[int], preset: str, tmp_path: Path) -> None:
    query = tmp_path / "nvidia-smi"
    query.write_text("#!/bin/sh\n" + "".join(f"echo {size}\n" for size in mebibytes))
    query.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run("bash", "scripts/train_gpt_one_gpu.sh", "--train-iters", "3", LAUNCH="echo", PATH=path, code=0)
    launched, *flags = shlex.split(done.stdout.splitlines()[-1])
    assert launched == "pretrain_gpt.py" and flags[:2] == ["--config", f"configs/one_gpu/{preset}.yaml"]
    assert validate(resolve(parse_args(flags), 1), 1) == []


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"GPU_MEMORY_GIB": "06"}, "GPU_MEMORY_GIB=6: the smallest preset needs 8 GiB; use configs/30m.yaml"),
        ({"GPU_MEMORY_GIB": "7.5"}, "GPU_MEMORY_GIB=7.5: must be a whole number of GiB, such as 24"),
        ({"PRESET": "80gb"}, "PRESET=80gb: the presets are 12gb 16gb 24gb 48gb 8gb"),
    ],
)
def test_a_gpu_without_a_preset_is_refused(variables: dict[str, str], said: str) -> None:
    assert said in run("bash", "scripts/train_gpt_one_gpu.sh", **variables, code=2).stderr


def test_a_gpu_that_shares_host_memory_gets_its_own_error(tmp_path: Path) -> None:
    query = tmp_path / "nvidia-smi"
    query.write_text("#!/bin/sh\necho '[N/A]'\n")
    query.chmod(0o755)
    found = run("bash", "scripts/train_gpt_one_gpu.sh", PATH=f"{tmp_path}:{os.environ['PATH']}", code=2).stderr
    assert found.startswith("no GPU that states its memory was found; set GPU_MEMORY_GIB to the memory of the card")


def test_a_script_passes_dry_run_on() -> None:
    done = run("bash", "scripts/train_gpt_single_node.sh", "--dry-run", "--world-size", "8", "--json", code=0)
    assert "parameters 1,315,819,520" in json.loads(done.stdout)["plan"]["Model"]
    assert done.stderr.startswith("+ ")


def test_an_interpreter_without_torch_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    done = run("bash", "scripts/train_gpt_single_node.sh", PYTHON=sys.executable, PYTHONPATH=str(tmp_path), code=1)
    assert "Traceback" not in done.stderr
    assert f"PYTHON={sys.executable}: torch cannot be imported (No module named 'torch'); set PYTHON" in done.stderr
    flags = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data --train-iters 1 --lr 1"
    done = run(sys.executable, "pretrain_gpt.py", *flags.split(), PYTHONPATH=str(tmp_path), code=1)
    assert "Traceback" not in done.stderr
    assert f"{sys.executable} has no torch: install requirements.txt" in done.stderr


def test_a_script_uses_the_launcher_it_is_given() -> None:
    done = run("bash", "scripts/gpt3_175b.sh", "--train-samples", "8", LAUNCH="echo torchrun --nnodes 3", code=0)
    words = done.stdout.strip().split("\n")[-1].split()
    assert words[:4] == ["torchrun", "--nnodes", "3", "pretrain_gpt.py"]
    assert words[-2:] == ["--train-samples", "8"]


@pytest.mark.parametrize("script", ["quickstart.sh", "train_gpt_slurm.sh"])
def test_wrong_usage_is_explained(script: str) -> None:
    done = run("bash", f"scripts/{script}", *(["--cleen"] if script == "quickstart.sh" else []), code=2)
    assert done.stderr.strip()


def test_corpus_is_real_source_in_a_fixed_order(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "deep/b.jsonl"
    for output in (first, second):
        run_program("tools/build_corpus.py", "--output", output, "--max-mb", "0.5", code=0)
    assert first.read_bytes() == second.read_bytes()
    documents = [json.loads(line) for line in first.read_text().splitlines()]
    assert 5e5 <= sum(len(document["text"].encode()) for document in documents) < 2e6
    assert all(len(document["text"]) >= 200 and "site-packages" not in document["path"] for document in documents)


def test_losses_are_plotted(tmp_path: Path) -> None:
    metrics, picture = tmp_path / "metrics.jsonl", tmp_path / "loss.svg"
    records = [{"iteration": i, "lm_loss": 8.0 / i} for i in range(1, 20)]
    records += [{"iteration": 10, "valid_loss": 2.0}, {"iteration": 19, "valid_loss": 1.0}]
    records += [{"iteration": 19, "eval/sums/acc": 0.5}, {"iteration": 19, "lm_loss": 0.25}]
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"iteration": 20, "lm_')
    done = run_program("tools/plot_loss.py", metrics, tmp_path, "--output", picture, "--log-scale", code=0)
    assert done.stdout.count("8.000 -> 0.250, 2 validation points") == 2
    assert "iteration" in picture.read_text() and "mathdefault" not in picture.read_text()


def test_a_closed_pipe_ends_a_tool_silently() -> None:
    command = f"{sys.executable} tools/plot_schedule.py --help | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert done.stderr == "" and done.stdout.splitlines()[-1] in ("0", "141")


def test_the_loss_plot_names_a_missing_file(tmp_path: Path) -> None:
    done = run_program("tools/plot_loss.py", tmp_path / "none.jsonl", "--output", tmp_path / "loss.png", code=2)
    assert "none.jsonl" in done.stderr
