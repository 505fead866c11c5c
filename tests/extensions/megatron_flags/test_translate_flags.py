"""tools/translate_flags.py translates commands and scripts of other programs to flags of this program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.common import shell_variables
from tools.common.hybrid_ratios import pattern_of
from tools.common.launch_script import LaunchScript
from tools.translate_flags import main

SCRIPT = """#!/bin/bash
# --not-a-flag in a comment
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8
TP=${TP:-2}
WIDTH="12288"
LAUNCH=(
    --nproc_per_node $GPUS
    --master_addr localhost
)
MODEL=(
    --num-layers 96
    --hidden-size ${WIDTH}  # wide
    --attention-backend fused # (cuDNN)
    --use-flash-attn
)
REST="--save $1 --eval-iters 10 --checkpoint-activations --split '949,50,1'"
torchrun ${LAUNCH[@]} pretrain_gpt.py ${MODEL[@]} --tensor-model-parallel-size $TP \\
    $REST --micro-batch-size $MBS | tee log
"""


def test_a_script_is_translated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT)
    assert main([str(script)]) == 0
    command, _, rest = capsys.readouterr().out.partition("\n\n")
    lines = [line.strip(" \\") for line in command.splitlines()]
    assert lines[0] == "pretrain_gpt.py"
    assert {"--num-layers 96", "--hidden-size 12288", "--tensor-model-parallel-size 2"} <= set(lines)
    assert {'--save "$1"', '--micro-batch-size "$MBS"', "--split 949,50,1"} <= set(lines)
    assert lines[-1] == "--recompute-granularity full --recompute-method uniform"
    assert "--checkpoint-activations -> --recompute-granularity full --recompute-method uniform" in rest
    assert "--attention-backend cudnn" in lines
    assert "--use-flash-attn: attention selects its kernel automatically" in rest
    assert "nproc" not in command + rest and "Not translated" not in rest
    assert "set them before you run the command:\n  $1 (--save)\n  $MBS (--micro-batch-size)\n" in rest
    assert main([str(script), "/runs/a"]) == 0
    printed = capsys.readouterr().out
    assert "--save /runs/a" in printed and "$1" not in printed and "$MBS (--micro-batch-size)" in printed


def test_flags_without_translation_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--num-layers 24 --mtp-use-repeated-layer --deepspeed --optimizer adaptive_muon"
    assert main(["--", *flags.split()]) == 1
    printed = capsys.readouterr().out
    assert "Without effect here:\n  --deepspeed: DeepSpeed is not used" in printed
    refused = printed.partition("Not translated:\n")[2]
    assert (
        "--mtp-use-repeated-layer: asks for this variant of multi-token prediction, which is not implemented" in refused
    )
    assert "--optimizer adaptive_muon" in refused and "Muon with a second moment" in refused


@pytest.mark.usefixtures("forget_extensions_at_once")
def test_values_of_examples_are_translated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--", *"--optimizer lion --lion-beta1 0.9".split()]) == 0
    assert "--lion-beta1 0.9" in capsys.readouterr().out


def test_input_without_script_or_flags_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "give a script, or flags after --" in capsys.readouterr().err
    empty = tmp_path / "empty.sh"
    empty.write_text("echo\n")
    with pytest.raises(ValueError, match="no launch script"):
        main([str(empty)])


STYLES = [
    ('o="--seed 2 --lr 64"\no+=" --bf16"\npython pretrain_gpt.py ${o}', "--seed 2 --lr 64 --bf16"),
    ('o="--seed 2"\no="$o --bf16"\npython pretrain_gpt.py $o', "--seed 2 --bf16"),
    ("python pretrain_gpt.py --data-path /a/b#c --bf16 # comment", "--data-path /a/b#c --bf16"),
    ('A=(\n --lr $((3 * 2))  # (six\n --bf16\n)\ntorchrun pretrain_gpt.py "${A[@]}"', "--lr 6 --bf16"),
    ("A=(--lr 1 --bf16)\npython pretrain_gpt.py ${A[*]} --seed `date +%s`", "--lr 1 --bf16 --seed `date +%s`"),
    ("X=1\npython pretrain_gpt.py --lr 1 ${X:+--bf16} ${Y:+--fp16} $@", "--lr 1 --bf16"),
    ("python tools/preprocess_data.py --workers 2\npython pretrain_gpt.py --lr 1", "--lr 1"),
    ('C="pretrain_gpt.py --lr 1"\nsrun --jobid 3 bash -c "$C"', "--lr 1"),
]


@pytest.mark.parametrize(("script", "words"), STYLES)
def test_other_flag_styles_are_accepted(script: str, words: str) -> None:
    assert " ".join(LaunchScript(script).flags()) == words


BRANCHES = [
    ('D=bf16; A="--$D"\nif [[ "$D" == "fp8" ]]; then A+=" --fp8-x hy"; fi\npretrain $A', "--bf16"),
    ('D=${6:-"M"}\nif [ "$D" = "M" ]; then A=--mock; else A="--data $D"; fi\npretrain $A', "--mock"),
    ('T=2; A=--x\ncase $T in 1) A+=" --a 1";; 2|3) A="$A --b 2";; *) A=;; esac\npretrain $A', "--x --b 2"),
    ('F=; G=1\n[ -n "$F" ] && A="--f"\n[ -n "$G" ] && A="$A --g"\npretrain $A', "--g"),
    ('pretrain --name "${P:-"Mix"}" --lr 1', "--name Mix --lr 1"),
    ('pretrain --save $(dirname "$1" x)/y --lr 1', '--save $(dirname "$1" x)/y --lr 1'),
    ('O="--lr 1"\nsrun --output=%j.log sh -c "python -u pretrain_gpt.py ${O} | tee x"', "--lr 1"),
]


@pytest.mark.parametrize(("script", "words"), BRANCHES)
def test_branches_and_quotes_are_parsed(script: str, words: str) -> None:
    found = LaunchScript(re.sub("^pretrain ", "python pretrain_gpt.py ", script, flags=re.MULTILINE))
    assert " ".join(found.flags()) == words and not found.unsure


def test_an_undecidable_branch_is_read_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.sh"
    script.write_text('A="--bf16"\nif [ -n "$KEY" ]; then A="$A --wandb-project p"; fi\npython pretrain_gpt.py $A')
    main([str(script)])
    printed = capsys.readouterr()
    assert "--wandb-project p" in printed.out
    assert printed.err == "flags from a branch whose condition is unknown: --wandb-project\n"


def test_other_files_are_not_launch_scripts() -> None:
    with pytest.raises(ValueError, match="no launch script"):
        main([__file__])


TWICE = [
    'A="x x"\n' + 'A="$A $A"\n' * 60,
    "A=(x x)\n" + "A=(${A[@]} ${A[@]})\n" * 60,
    "A=xx\n" + 'A+="$A"\n' * 60,
    f"A={'x' * 9000}\nB={'$A' * 9000}\n",
]


@pytest.mark.parametrize("script", TWICE)
def test_variables_that_double_themselves_are_refused(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell_variables, "MOST", 50_000)
    file = tmp_path / "run.sh"
    file.write_text(f"{script}python pretrain_gpt.py --num-layers 2 $A\n")
    with pytest.raises(
        ValueError, match=r"run.sh: its variables expand to more than 50,000 characters, the last one being A; "
    ):
        main([str(file)])


JOB = """#!/bin/bash
#SBATCH --job-name="my run"  # a comment
#SBATCH -N 4 --gpus-per-node=8
#SBATCH --ntasks-per-node=8
##SBATCH --mem=1G
module load cuda
#SBATCH --partition=ignored
srun python pretrain_gpt.py --num-layers 2
"""


def test_options_of_sbatch_are_translated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.sh"
    file.write_text(JOB)
    assert main([str(file)]) == 0
    said = capsys.readouterr().out
    options = [
        "sbatch",
        "'--job-name=my run'",
        "-N 4",
        "--gpus-per-node=8",
        "scripts/train_gpt_slurm.sh pretrain_gpt.py",
    ]
    assert said.startswith(" \\\n    ".join([*options, "--num-layers 2\n"]))
    assert "  --ntasks-per-node=8: not needed, because scripts/train_gpt_slurm.sh starts one process per GPU" in said
    assert "SETUP_FILE=FILE sbatch" in said and "mem" not in said and "ignored" not in said


ALLOCATIONS = {
    (56, 0.08, 0.5): "M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-",  # from the published 8B hybrid model
    (10, 0.2, 0): "MMM*MM*MMM",
    (10, 0, 0.3): "MM-MMM-MM-",
    (10, 0.3, 0.2): "MM*M-*M*M-",
    (48, 0.25, 0.25): "MM-*MM-*MM*-MM*-MM*-MM*-M*M-M*M-M*M-M*M-*MM-*MM-",
    (52, 0.0769, 0.4): "M-MM-M-M-M*-MM-M-M-M*M-M-M-M-MM*-M-M-MM-M*-M-M-MM-M-",
    (10, 0.1, 0.9): "-----*----",
    (7, 0.5, 0.5): "-**-**-",
    (9, 0, 0): "MMMMMMMMM",
    (1, 1, 0): "*",
}


@pytest.mark.parametrize("shares", ALLOCATIONS, ids=str)
def test_layer_shares_are_allocated_as_in_megatron(shares: tuple[int, float, float]) -> None:
    assert pattern_of(*shares) == ALLOCATIONS[shares]


@pytest.mark.parametrize("shares", [(0, 0.1, 0.1), (8, 0.6, 0.5), (8, -0.1, 0.5)], ids=str)
def test_shares_of_more_than_all_layers_are_refused(shares: tuple[int, float, float]) -> None:
    with pytest.raises(ValueError, match="must be shares that add up to at most 1"):
        pattern_of(*shares)


def test_a_script_with_shares_gets_the_pattern(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(
        "torchrun pretrain_mamba.py --num-layers 56 --hidden-size 4096 --num-attention-heads 32 --is-hybrid-model "
        "--hybrid-attention-ratio 0.08 --hybrid-mlp-ratio 0.5"
    )
    assert main([str(tmp_path / "run.sh")]) == 0
    said = capsys.readouterr().out
    command, _, rest = said.partition("\n\n")
    assert f"--hybrid-layer-pattern '{ALLOCATIONS[56, 0.08, 0.5]}'" in command and "ratio" not in command
    assert "Computed from the shares of layers, as Megatron-LM does:\n" in rest and "Not translated" not in rest
    for other in ("--hybrid-attention-ratio 0.8 --hybrid-mlp-ratio 0.5 --num-layers 8", "--hybrid-mlp-ratio 0.5"):
        assert main(["--", *other.split(), "--hidden-size", "64"]) == 1
        assert "tools/translate_flags.py computes from these flags" in capsys.readouterr().out
