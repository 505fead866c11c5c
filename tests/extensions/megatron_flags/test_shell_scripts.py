"""Launch scripts may contain shell arithmetic, shell tests and SLURM variables."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.common.batch_options import slurm_variables
from tools.common.launch_script import LaunchScript
from tools.common.shell_arithmetic import UnknownNameError, evaluate
from tools.translate_flags import main

EXPRESSIONS = [
    "A/100 + -7/2 - -7%3",
    "2**3**2 - -2**2",
    "(A > 3 && B < 2) * 5 + !A",
    "A ? B : 9",
    "010 + 0x1F",
    "1 << 62 << 1",
    "9223372036854775807 + 1",
    "3**1000001",
    "~5 & 12 ^ 3 | 64",
    "C * 2 + D",
    "1 == 1 != 0 || 0",
    "",
]
VALUES = {"A": "1000000", "B": "7", "C": "A+B", "D": ""}


def test_arithmetic_matches_bash() -> None:
    lines = [*(f"{name}='{value}'" for name, value in VALUES.items()), *(f"echo $(({each}))" for each in EXPRESSIONS)]
    said = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True).stdout
    assert [evaluate(each, VALUES.get) for each in EXPRESSIONS] == [int(line) for line in said.split()]


@pytest.mark.parametrize(
    "expression", ["1/0", "2**-1", "1 +", "(1", "1 2", "a.b", "$X", "09", "(" * 5000, "E", "1 ? 2"]
)
def test_a_text_that_is_not_arithmetic_has_no_value(expression: str) -> None:
    with pytest.raises(ValueError, match=r"arithmetic|expected|levels|less than 0|division|invalid literal"):
        evaluate(expression, {"E": "F", "F": "E"}.get)


def test_a_name_without_a_value_is_named() -> None:
    with pytest.raises(UnknownNameError, match="N"):
        evaluate("N * 2", VALUES.get)


def translated(text: str, folder: Path, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    file = folder / "run.sh"
    file.write_text(text)
    assert main([str(file)]) == code
    return capsys.readouterr().out


def test_variables_in_arithmetic_are_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = (
        "TRAIN_SAMPLES=1000000; WARM=$((TRAIN_SAMPLES/100)); GPUS=(8 4)\n((GBS = 4 * GPUS)); let GBS*=2\n"
        "torchrun pretrain_gpt.py --num-layers 2 --train-samples $TRAIN_SAMPLES --lr-warmup-samples $WARM "
        "--global-batch-size $GBS --seed $(echo $((WARM * 2)))"
    )
    said = translated(script, tmp_path, capsys)
    assert "--lr-warmup-samples 10000 " in said and "--global-batch-size 64 " in said
    assert '--seed "$(echo 20000)"' in said


def test_arithmetic_with_an_unknown_name_is_not_translated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "B=4\nW=$((NODES * B))\npython pretrain_gpt.py --num-layers 2 --global-batch-size $W --seed $((1/0))"
    command, _, rest = translated(script, tmp_path, capsys, code=1).partition("Not translated:\n")
    assert "global-batch-size" not in command and "seed" not in command
    assert '--global-batch-size "$((NODES * 4))": the script gives no value to NODES; give a number' in rest
    assert '--seed "$((1/0))": only a shell computes this value' in rest


@pytest.mark.parametrize("loop", ["for i in 1 2; do N=$((N + 1))", "while ((N < 2)); do ((N += 1))"])
def test_loop_counters_are_not_translated(loop: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = f"N=0\n{loop}\ndone\npython pretrain_gpt.py --num-layers 2 --seed $N"
    assert "the script gives no value to N; give a number" in translated(script, tmp_path, capsys, code=1)


SLURM = """#!/bin/bash
#SBATCH -N 4
#SBATCH --ntasks-per-node=8
G=$((2 * SLURM_NTASKS * $SLURM_JOB_NUM_NODES))
if [ $SLURM_NNODES -gt 2 ]; then T=8; else T=4; fi
srun python pretrain_gpt.py --num-layers 2 --global-batch-size $G --tp $T --save runs/$SLURM_JOB_ID
"""


def test_options_of_sbatch_state_variables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = translated(SLURM, tmp_path, capsys)
    assert "--global-batch-size 256 " in said and "--tp 8 " in said
    assert "replace them if you run the command elsewhere:\n  SLURM_JOB_ID\n" in said
    said = translated(SLURM.replace("#SBATCH -N 4", ""), tmp_path, capsys, code=1)
    assert "the script gives no value to SLURM_NTASKS or SLURM_JOB_NUM_NODES" in said
    assert "T: 8 or 4; read as the last" in said
    options = [["--nodes=2-4"], ["-n", "6"], ["--gres=gpu:a100:8"], ["-c4"]]
    assert slurm_variables(options) == {
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), "6"),
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_PER_TASK": "4",
    }


TESTS = [
    ("[[ $USE_MOE -eq 1 ]]", "no"),
    ("[[ USE_MOE -eq 0 ]]", "yes"),
    ("[ $USE_MOE -eq 1 ]", "no"),
    ('[ -z "$USE_MOE" ]', "yes"),
    ("[ -n $USE_MOE ]", "yes"),
    ("((USE_MOE))", "no"),
    ("((SIX % 4 == 2 && !USE_MOE))", "yes"),
    ('[[ "$USE_MOE" == "" ]]', "yes"),
    ("[[ $SIX -ge 2*3 ]]", "yes"),
    ("[[ $((SIX / 4)) -eq 1 && $SIX != 7 ]]", "yes"),
    ("[[ $RANK -eq 0 ]]", "both"),
    ("((SLURM_NNODES > 1))", "both"),
    ("[ $# -gt 1 ]", "both"),
]


@pytest.mark.parametrize(("test", "answer"), TESTS)
def test_tests_are_evaluated_like_in_bash(test: str, answer: str) -> None:
    script = LaunchScript(f"SIX=6\nif {test}; then A=yes; else A=no; fi\npython pretrain_gpt.py --name $A")
    assert script.choices == ({"A": ["yes", "no"]} if answer == "both" else {})
    assert script.flags()[1] == answer or answer == "both"
    if answer != "both":
        said = subprocess.run(["bash", "-c", f"SIX=6; {test} && echo yes || echo no"], capture_output=True, text=True)
        assert said.stdout.strip() == answer


def test_variables_of_other_scripts_and_loops_are_not_unset() -> None:
    for line in ("source settings.sh", "read MOE", "for MOE in 0 1; do echo $MOE; done"):
        script = LaunchScript(f"{line}\nif [[ $MOE -eq 1 ]]; then E=8; else E=1; fi\npython pretrain_gpt.py --ep $E")
        assert script.choices == {"E": ["8", "1"]} and not script.variables.read_as_unset


def test_variables_read_as_unset_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = 'if [[ $MOE -eq 1 ]]; then A="--num-experts 8"; fi\npython pretrain_gpt.py --num-layers 2 $A'
    said = translated(script, tmp_path, capsys)
    assert "num-experts" not in said and "$A" not in said and "because the script does not set them:\n  MOE\n" in said


PARAMETERS = [
    *("${#A[@]}", "${#A[*]}", "${#A[1]}", "${#N}", "${A[0]}", "${A[-1]}", "${A[K]}", "${A[9]}", "${A[K+1]}"),
    *(
        "${A[@]:1}",
        "${A[@]:1:1}",
        "${A[@]: -1}",
        "${N:2}",
        "${N:1:2}",
        "${N: -2}",
        "${N:0:-1}",
        "${N:K:K}",
        "${N: -99}",
    ),
    *("${F%.json}", "${F%%.*}", "${F##*/}", "${F#*/}", "${F%.txt}", "${F/a/-}", "${F//[a-c]/-}", "${F//.}", "${F##*.}"),
    *("${N^^}", "${N^}", "${U,,}", "${U,}", "${A[0]:-x}", "${A[7]:-x}", "${A[@]/o/0}", "${F%$S}"),
    *("$((${#A[@]} * 2))", "$((${A[1]:0:0}7 + ${#N}))", "${A[@]}", "${N:-y}", "${MISSING:-${N:1:1}}"),
]
GIVEN = "A=(zero one two three); N=name; K=1; F=a/b.c/data.tar.json; U=UP; S=.json"


def test_parameters_match_bash() -> None:
    lines = "\n".join([GIVEN.replace("; ", "\n"), *(f'echo "{each}"' for each in PARAMETERS)])
    said = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, check=True).stdout.splitlines()
    script = LaunchScript(lines)
    assert [" ".join(script.variables.fields(f'"{each}"')) for each in PARAMETERS] == said


COUNTED = [
    "((N++))",
    "((++N))",
    "((N--))",
    "((N+=2))",
    "((N *= 3, M = N + 1))",
    "let N++",
    "let N+=5 M=N",
    "(( N = N<<2 ))",
]


@pytest.mark.parametrize("command", COUNTED)
def test_steps_of_arithmetic_match_bash(command: str) -> None:
    lines = f"N=4\nM=0\n{command}\n"
    said = subprocess.run(["bash", "-c", f"{lines}echo $N $M"], capture_output=True, text=True, check=True).stdout
    values = LaunchScript(lines).variables.values
    assert [values["N"], values["M"]] == said.split()


def test_arrays_are_expanded_as_far_as_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = (
        "GPUS=(0 1 2 3)\nARGS=(--num-layers 2 --seed 5)\n((SEED++))\n"
        'torchrun --nproc-per-node ${#GPUS[@]} pretrain_gpt.py "${ARGS[@]:0:2}" --tp ${#GPUS[@]} '
        "--global-batch-size $((${#GPUS[@]} * 2)) \\\n  --num-workers ${WORKERS:-$(nproc)} \\\n  "
        "--micro-batch-size $((NODES * 2))"
    )
    said = translated(script, tmp_path, capsys, code=1)
    assert "--num-layers 2" in said and "--tp 4 " in said and "--global-batch-size 8 " in said and "--seed" not in said
    assert '--num-workers "$(nproc)"' in said
    assert '--micro-batch-size "$((NODES * 2))": the script gives no value to NODES; give a number (line 6)' in said
