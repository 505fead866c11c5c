"""Each known difference from Megatron-LM is printed if flags meet it, and by `tools/translate_flags.py --list`."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.extensions.megatron_flags.megatron_differences import DIFFERENCES, MET, differences_met
from megatron.training.config.arguments import config_of, read_flags
from megatron.training.config.validation import resolve
from tools.translate_flags import main

TINY = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --vocab-size 128 --mock-data"
TWO = "--global-batch-size 2"
ROPE = "--position-embedding-type rope"
LATENT = "--multi-latent-attention"
BALANCED = "--num-experts 2 --moe-aux-loss-coeff 1e-2"
MEETING = {
    "loss": (
        [f"--eod-mask-loss {TWO}"],
        ["--eod-mask-loss", TWO, f"--eod-mask-loss {TWO} --calculate-per-token-loss"],
    ),
    "multi-token prediction across documents and loss masks": (
        ["--mtp-num-layers 1 --eod-mask-loss", "--mtp-num-layers 1 --reset-attention-mask"],
        ["--mtp-num-layers 1", "--eod-mask-loss", "--reset-attention-mask"],
    ),
    "`--window-size` with `--reset-attention-mask`": (
        ["--window-size 4 --reset-attention-mask"],
        ["--window-size 4", "--reset-attention-mask"],
    ),
    "`--no-rope-freq` with `--multi-latent-attention`": (
        [f"{LATENT} --no-rope-freq 2"],
        [LATENT, f"{ROPE} --no-rope-freq 2"],
    ),
    "`--mscale-all-dim` with `--rope-type rope`": (
        [f"{LATENT} --rope-type rope --mscale-all-dim 1"],
        [f"{LATENT} --rope-type rope", f"{LATENT} --mscale-all-dim 1"],
    ),
    "`global_aux_loss` of experts": (
        [f"{BALANCED} --moe-router-load-balancing-type global_aux_loss --micro-batch-size 2"],
        [f"{BALANCED} --moe-router-load-balancing-type global_aux_loss {TWO}"],
    ),
    "`aux_loss` of experts": (
        [f"{BALANCED} {TWO}"],
        [BALANCED, f"--num-experts 2 {TWO}", f"{BALANCED} {TWO} --moe-router-load-balancing-type seq_aux_loss"],
    ),
    "balancing losses under loss masks": (
        [f"{BALANCED} --eod-mask-loss --calculate-per-token-loss"],
        [f"{BALANCED} --eod-mask-loss", f"{BALANCED} --calculate-per-token-loss"],
    ),
    "capacity of experts (`--moe-expert-capacity-factor`)": (
        [
            f"--num-experts 2 --moe-expert-capacity-factor 1 {cut}"
            for cut in ("--micro-batch-size 2", "--cp 2", "--tp 2 --sequence-parallel")
        ],
        ["--num-experts 2 --moe-expert-capacity-factor 1", "--num-experts 2 --micro-batch-size 2"],
    ),
    "multi-token prediction, dropout of the embedding": (
        ["--mtp-num-layers 1"],
        ["--mtp-num-layers 1 --hidden-dropout 0", "--hidden-dropout 0.2"],
    ),
    "sinkhorn routing": (
        ["--num-experts 2 --moe-router-load-balancing-type sinkhorn"],
        ["--num-experts 2", "--moe-router-load-balancing-type sinkhorn"],
    ),
    "forced load balancing": (
        ["--num-experts 2 --moe-router-force-load-balancing"],
        ["--num-experts 2", "--moe-router-force-load-balancing"],
    ),
    "`--qk-l2-norm`": (
        [f"{ROPE} --qk-l2-norm --no-rope-freq 2", "--qk-l2-norm"],
        [f"{ROPE} --qk-l2-norm", f"{ROPE} --no-rope-freq 2"],
    ),
    "default width of a gated MLP": (
        ["--quick-geglu", "--activation-func geglu"],
        ["--quick-geglu --ffn-hidden-size 64", "--swiglu", "--squared-relu"],
    ),
    "Muon, learned position embeddings": (
        ["--optimizer muon"],
        [f"--optimizer muon {ROPE}", "--optimizer adam"],
    ),
    "Muon, gated MLPs": (
        ["--optimizer muon --swiglu"],
        ["--optimizer muon", "--swiglu", "--optimizer muon --swiglu --muon-no-split-gate-up"],
    ),
    "padded vocabulary": (["--vocab-size 129", "--tp 2"], ["--vocab-size 129 --pad-vocab-size-to 129"]),
    "`--rope-scaling-factor`": (
        ["--use-rope-scaling --rope-scaling-factor 32"],
        ["--use-rope-scaling", "--rope-scaling-factor 32"],
    ),
    "`--openai-gelu`": (
        ["--openai-gelu --disable-bias-linear", "--openai-gelu --no-bias-gelu-fusion"],
        ["--openai-gelu", "--disable-bias-linear"],
    ),
    "`--embedding-init-method-std`": (
        ["--embedding-init-method-std 1"],
        ["--embedding-init-method-std 1 --weight-decay-on matrices", "--init-method-std 1"],
    ),
    "`--optimizer lion`": (["--optimizer lion"], ["--optimizer muon --muon-scalar-optimizer lion"]),
    "`--rampup-batch-size`": (["--rampup-batch-size 1 1 4"], []),
    "`--step-batch-size-schedule` with lengths in iterations": (
        ["--step-batch-size-schedule 0:1 --train-iters 9"],
        ["--step-batch-size-schedule 0:1 --train-samples 9", "--train-iters 9"],
    ),
    "`--step-batch-size-schedule`, validation": (
        ["--step-batch-size-schedule 0:1"],
        [f"--step-batch-size-schedule 0:1 {more}" for more in ("--eval-iters 0", "--eval-global-batch-size 1")],
    ),
}
"""Subject of a difference -> flags that meet it, and flags that do not."""


def subjects_met(flags: str) -> set[str]:
    reader = read_flags(f"{TINY} {flags}".split())
    assert not reader.problems
    met = set(differences_met(resolve(config_of(reader.values), 1), reader.spelled))
    return {each.subject for each in DIFFERENCES if str(each) in met}


def test_every_difference_is_listed_and_has_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [each.subject for each in DIFFERENCES if f"  {each}" not in listed] == []
    assert MEETING.keys() == MET.keys() == {each.subject for each in DIFFERENCES}
    assert subjects_met("") == set()


@pytest.mark.usefixtures("forget_extensions_at_once")
@pytest.mark.parametrize("subject", MEETING)
def test_flags_meet_a_difference(subject: str) -> None:
    meet, others = MEETING[subject]
    assert [flags for flags in meet if subject not in subjects_met(flags)] == []
    assert [flags for flags in others if subject in subjects_met(flags)] == []


def test_flags_of_a_file_count_as_given(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("calculate_per_token_loss: true\ntrain-iters: 5\neod-mask-loss: false\n")
    assert read_flags(["--config", str(file)]).spelled >= {"--calculate-per-token-loss", "--train-iters"}
    assert "--eod-mask-loss" not in read_flags(["--config", str(file)]).spelled


def test_a_translation_tells_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--", *TINY.split(), "--eod-mask-loss", "--global-batch-size", "2"]) == 0
    told = capsys.readouterr().out.partition("Different from Megatron-LM:\n")[2]
    assert told.startswith("  loss: sum over tokens")
