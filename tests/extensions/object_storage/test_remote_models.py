"""A run and the tools use tokenizers, Hugging Face folders and checkpoints in object storage."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from megatron.extensions import load
from tests.corpus import byte_level
from tests.extensions.object_storage.server import BUCKET, credentials, environment, file_system, s3_server
from tests.forked import forked_ranks, run_forked, run_program
from tests.limits import HANG, wait_for
from tools.common import run_tool
from tools.serve import main

pytest.importorskip("s3fs")
ROOT = f"s3://{BUCKET}"
MODEL = (
    "--cpu --num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --lr 1e-2 --eval-iters 0 "
    "--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --global-batch-size 4 --train-iters 2 --num-workers 0 --split 100,0,0"
)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    load()
    cache = {"MEGATRON_STORAGE_CACHE": str(tmp_path_factory.mktemp("cache"))}
    with s3_server() as port, environment(credentials(port) | cache):
        yield port


def test_tokenizers_and_models_are_read_from_urls(port: int, tmp_path: Path) -> None:
    files, tokenizer = file_system(), tmp_path / "tokenizer"
    tokenizer.mkdir()
    byte_level(special=["<eos>"]).save(str(tokenizer / "tokenizer.json"))
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    files.put(str(tokenizer), f"{BUCKET}/tokenizer", recursive=True)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"line {n} of text"}) + "\n" for n in range(50)))
    run, url = f"{ROOT}/run", f"{ROOT}/tokenizer"
    named = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"]
    data = ["--data-path", str(tmp_path / "a.jsonl"), "--data-cache-path"]
    said = [
        run_forked(
            1,
            [*MODEL.split(), *named, model, *data, str(tmp_path / name), "--save", save, "--log-interval", "1"],
            tmp_path / "screen",
        )
        for name, model, save in (("x", f"{url}/tokenizer.json", run), ("y", str(tokenizer), str(tmp_path / "local")))
    ]
    assert all("saved checkpoint at iteration 2" in text for text in said)
    run_program("tools/inspect_checkpoint.py", f"{run}/iter_0000002", tmp_path / "local", code=0)
    assert files.exists(f"{BUCKET}/run/tokenizer/tokenizer_config.json")
    prompt = ("--prompt", "line 1", "--max-new-tokens", "5")
    expected = run_program("tools/generate_text.py", "--load", tmp_path / "local", *prompt, code=0).stdout
    hf = f"{ROOT}/hf"
    run_program("tools/convert_checkpoint.py", "--input", run, "--output", hf, code=0)
    assert files.exists(f"{BUCKET}/hf/tokenizer.json") and files.exists(f"{BUCKET}/hf/model.safetensors")
    files.rm(f"{BUCKET}/tokenizer", recursive=True)
    assert run_program("tools/generate_text.py", "--load", run, *prompt, code=0).stdout == expected, "as it was kept"
    assert run_program("tools/generate_text.py", "--load", hf, *prompt, code=0).stdout == expected
    serving, ready = ["--load", run, "--device", "cpu", "--port", "0"], re.compile(r"serving run at (http://\S+/v1)")
    with forked_ranks(1, serving, tmp_path / "served", main=lambda argv: run_tool(partial(main, argv))) as server:
        found = wait_for(
            lambda: ready.search((tmp_path / "served").read_text()), server, (tmp_path / "served").read_text
        )
        with urllib.request.urlopen(f"{found[1]}/models", timeout=HANG) as answer:
            assert json.loads(answer.read())["data"][0]["id"] == "run"
    run_program("tools/convert_checkpoint.py", "--input", hf, "--output", f"{ROOT}/again", code=0)
    run_program("tools/inspect_checkpoint.py", f"{ROOT}/again", hf, code=0)
    flags = ["--cpu", "--fp32", "--load", hf, *data, str(tmp_path / "z"), "--seq-length", "16", "--lr", "1e-2"]
    flags += ["--eval-iters", "0", "--split", "100,0,0", "--global-batch-size", "4", "--train-iters", "1"]
    assert f"loaded weights from {hf}: starting at iteration 0" in run_forked(1, flags, tmp_path / "screen")


def test_an_unreadable_tokenizer_is_named(port: int, tmp_path: Path) -> None:
    said = run_program(
        *("pretrain_gpt.py", *MODEL.split(), "--mock-data", "--tokenizer-type", "SentencePieceTokenizer"),
        *("--tokenizer-model", f"{ROOT}/none/tokenizer.model"),
        code=2,
    ).stderr
    assert f"--tokenizer-model {ROOT}/none/tokenizer.model" in said and "there is no such file" in said
