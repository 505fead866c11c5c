"""Tests of launch scripts that users of Megatron-LM and Megatron-DeepSpeed would write. The scripts run unchanged. The
tests only append flags that make the model small."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.data import TokenizerConfig
from megatron.core.dist_checkpointing.path_kind import saved_folders
from megatron.core.tokenizers import build_tokenizer
from megatron.extensions.data.datasets.indexed_writer import best_dtype
from tests.apart import run_command
from tests.corpus import write_documents
from tests.extensions import needs
from tests.forked import ROOT, run_forked

SCRIPTS = ROOT / "tests" / "fixtures" / "launch_scripts"

SMALL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --kv-channels 8 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --eval-interval 2 --eval-iters 1 "
    "--log-interval 1 --save-interval 2 --cpu --distributed-backend gloo --num-workers 0"
).split()
THREE = "--train-iters 3 --lr-warmup-fraction 0.0 --lr-decay-iters 3".split()
SHRUNK = {
    "torchrun_arrays": [*THREE, *"--initial-loss-scale 1024 --tp 2 --pp 1".split()],
    "slurm_torchrun": "--train-iters 3 --lr-warmup-iters 1 --lr-wsd-decay-iters 1 --num-query-groups 2 --pp 1".split(),
    "slurm_python": (
        "--tp 2 --train-samples 12 --lr-decay-samples 12 --lr-warmup-samples 4 --rampup-batch-size 4 4 4".split()
    ),
    "deepspeed": (
        "--train-samples 12 --train-tokens 192 --lr-decay-tokens 192 --lr-warmup-tokens 64 --initial-loss-scale 1024"
    ).split(),
    "mixture_of_experts": (
        "--train-iters 3 --lr-decay-iters 3 --lr-warmup-iters 1 --num-query-groups 2 --num-experts 4 --pp 1 --ep 2"
    ).split(),
}

# Programs that replace the launchers and come first in PATH. srun runs its command once. The other launchers record the
# words of the command.
TELL = 'import json, sys; json.dump(sys.argv[2:], open(sys.argv[1], "w"))'
STAND_INS = {
    "srun": 'while [[ "$1" == -* ]]; do shift; done; exec "$@"',
    "scontrol": "echo localhost",
    **dict.fromkeys(("torchrun", "deepspeed", "python"), f'exec {sys.executable} -c \'{TELL}\' "$COMMAND" "$@"'),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Create a data set and one tokenizer of each kind."""
    import sentencepiece
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("data")
    texts = [f"{word} and {word} make {2 * number}. " * 3 for number, word in enumerate(["one", "two", "three"] * 400)]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    bpe.save_model(str(folder))
    (folder / "hf").mkdir()
    bpe.save(str(folder / "hf" / "tokenizer.json"))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_prefix=str(folder / "sp"),
        vocab_size=300,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    found = {"vocab": str(folder / "vocab.json"), "merges": str(folder / "merges.txt"), "hf": str(folder / "hf")}
    kinds = {
        "bpe": TokenizerConfig("GPT2BPETokenizer", vocab_file=found["vocab"], merge_file=found["merges"]),
        "sp": TokenizerConfig("SentencePieceTokenizer", tokenizer_model=str(folder / "sp.model")),
    }
    for name, config in kinds.items():
        tokenizer = build_tokenizer(config)
        documents = (np.array([*tokenizer.tokenize(text), tokenizer.eod]) for text in texts)
        prefix = folder / f"{name}_text_document"
        found[f"{name}_data"] = write_documents(prefix, documents, best_dtype(tokenizer.vocab_size))
    return found | {"sp": str(folder / "sp.model")}


def started(script: str, folder: Path, arguments: list[str], **environ: str) -> list[str]:
    """Return the flags that a script finally passes to pretrain_gpt.py."""
    for name, body in STAND_INS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    environ |= {"PATH": f"{folder}:{os.environ['PATH']}", "COMMAND": str(folder / "command.json")}
    run_command(["bash", SCRIPTS / f"{script}.sh", *arguments], code=0, env=os.environ | environ)
    words = json.loads((folder / "command.json").read_text())
    return words[words.index("pretrain_gpt.py") + 1 :]


@pytest.mark.parametrize(
    "script", [needs("phases", name) if "--rampup-batch-size" in words else name for name, words in SHRUNK.items()]
)
def test_each_script_trains_unchanged(script: str, tmp_path: Path, files: dict[str, str]) -> None:
    save = tmp_path / "run"
    save.mkdir()
    arguments = {
        "torchrun_arrays": [str(save), str(save / "tb"), files["vocab"], files["merges"], files["bpe_data"]],
        "deepspeed": [str(tmp_path), files["bpe_data"], files["vocab"], files["merges"]],
    }
    sentencepiece = script in ("slurm_python", "mixture_of_experts")
    environ = {
        "DATA": files["sp_data" if sentencepiece else "bpe_data"],
        "DATA_PATH": files["sp_data"],
        "TOKENIZER": files["sp" if sentencepiece else "hf"],
        "TOKENIZER_MODEL": files["sp"],
        "CACHE": str(tmp_path / "cache"),
        "SAVE": str(save),
        "RUN_ROOT": str(tmp_path),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_ID": "77",
    }
    flags = started(script, tmp_path, arguments.get(script, []), **environ)
    metrics = tmp_path / "metrics.jsonl"
    small = [*SMALL, *SHRUNK[script], "--save", str(save), "--load", str(save), "--metrics-file", str(metrics)]
    said = run_forked(2, [*flags, *small], tmp_path / "screen")
    assert "Traceback" not in said
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [record["lm_loss"] for record in records if "lm_loss" in record]
    assert len(losses) == 3 and all(0 < loss < math.log(600) for loss in losses), said
    assert any("valid_loss" in record for record in records)
    assert 3 in saved_folders(save)
