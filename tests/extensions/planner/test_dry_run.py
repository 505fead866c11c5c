"""Tests of the plan and the error messages that `--dry-run` prints."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import pretrain_gpt
from megatron.core.config.layers import LAYERS
from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import stage_parameters
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.transformer.layer import TransformerLayer
from megatron.core.transformer.mlp import MLP
from megatron.extensions.plan.planner import fake_stage
from megatron.extensions.plan.planner.device_file import FOLDER
from megatron.training.config.arguments import parse_args
from megatron.training.config.batch_size import byte_text
from megatron.training.config.reading import FOREIGN_PROGRAMS
from megatron.training.config.validation import resolve_legal
from tests.forked import run_program
from tests.tiny import TINY

WRONG = (
    "--dry-run --world-size 64 --num-layers 30 --hidden-size 1000 --num-attention-heads 12 --seq-length 2048 --tp 8 "
    "--pp 4 --micro-batch-size 3 --global-batch-size 64 --mock-data"
)
RIGHT = (
    "--dry-run --world-size 8 --num-layers 7 --hidden-size 64 --num-attention-heads 8 --seq-length 128 --tp 2 --pp 2 "
    "--micro-batch-size 2 --global-batch-size 16 --mock-data --vocab-size 1000 --lr 1e-3 --train-iters 10"
)


def pretrain(flags: str, code: int | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    return run_program("pretrain_gpt.py", *flags.split(), code=code, **environ)


def test_all_problems_at_once() -> None:
    done = pretrain(WRONG, code=2)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines() == [
        "This configuration cannot run: 5 problems.",
        "  --lr: is required; add the peak learning rate, for example --lr 3e-4",
        "  --hidden-size 1000: must be a multiple of --num-attention-heads 12; nearest: 984 or 1008, or add "
        "--kv-channels",
        "  --num-attention-heads 12: must be a multiple of --tensor-model-parallel-size 8; nearest: 8 or 16",
        "  --global-batch-size 64: must be a multiple of --micro-batch-size 3 * data-parallel size 2 = 6; nearest: "
        "60 or 66, or use --micro-batch-size 1",
        "  --mock-data: synthetic data has no epochs, so the run needs a length; add --train-iters, "
        "--train-samples or --train-tokens",
    ]


def test_printed_remedies_work() -> None:
    fixed = WRONG.replace("1000", "1008").replace("heads 12", "heads 16").replace("64 --mock", "66 --mock")
    pretrain(f"{fixed} --lr 3e-4 --train-iters 10", code=0)


class WideningLayer(TransformerLayer):
    """Layer whose MLP width depends on the layer number, so that every layer has a different size."""

    def build_mlp(self, name: str, config: TransformerConfig, ctx: TPContext) -> MLP:
        return MLP(name, config, ctx, 64 * (1 + ctx.layer))


def test_a_plan_builds_all_layers_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Identical layers of a model are built only once, and the plans of memory, FLOPs and step times share the built
    layers. Layers that depend on the layer number are not identical."""
    monkeypatch.setattr(LAYERS, "_entries", dict(LAYERS._entries))
    LAYERS.register("widening", WideningLayer)
    numbers: list[list[int]] = []

    class CountedModel(GPTModel):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            numbers.append(list(self.decoder.numbers))

    for module in (fake_stage, stage_parameters):
        monkeypatch.setattr(module, "GPTModel", CountedModel)
    flags = f"{TINY} --num-layers 6"
    plans = {}
    for part in ("transformer_layer", "widening"):
        numbers.clear()
        stage_parameters.built_layers.cache_clear()
        stage_parameters._layers.cache_clear()
        with pytest.raises(SystemExit) as done:
            pretrain_gpt.main(["--dry-run", "--device", "h100", *flags.split(), "--layer-module", part])
        assert not done.value.code
        assert sum(each == [*range(6)] for each in numbers) == 1
        (plans[part],) = re.findall(r"(\S+) matrix multiplications", capsys.readouterr().out)
    model = resolve_legal(parse_args(flags.split()), 1).model
    widths = (64 * (1 + number) - model.ffn_size for number in range(6))
    added = 6 * 2 * model.hidden_size * sum(widths)
    assert float(plans["widening"]) == pytest.approx(float(plans["transformer_layer"]) + added, rel=1e-5)


def test_plan_is_printed() -> None:
    done = pretrain(RIGHT, code=0)
    lines = [line.strip() for line in done.stdout.splitlines()]
    # The parameters are the token and position embeddings, 12 h^2 elements for the matrices and 13 h elements for the
    # biases and norms of each layer, and the final norm.
    assert f"parameters {1024 * 64 + 128 * 64 + 7 * (12 * 64**2 + 13 * 64) + 2 * 64:,}" in lines
    assert "TP 2, CP 1, DP 2, PP 2, EP 1" in lines
    assert "TP 4 groups of 2: [0,1] [2,3] [4,5] [6,7]" in lines
    assert "DP 4 groups of 2: [0,2] [1,3] [4,6] [5,7]" in lines
    assert "PP 4 groups of 2: [0,4] [1,5] [2,6] [3,7]" in lines
    assert "global batch 16 = micro-batch 2 x 4 micro-batches x 2 replicas; 2,048 tokens a step" in lines
    assert any(line.startswith("10 iterations, 160 samples, 20,480 tokens, ") for line in lines)
    stages = [line for line in lines if re.match(r"[01]   ", line)]
    assert len(stages) == 2
    assert "embedding, layers 0-" in stages[0] and "norm, head" in stages[1]
    layers = [int(count) for line in stages for count in re.findall(r"\((\d+)\)", line)]
    assert sum(layers) == 7


def test_bytes_of_states_match_the_plan_as_json(tmp_path: Path) -> None:
    """The test compares the bytes of each rank, and the bytes of optimizer states and copy buffers in host memory.
    test_measured_memory.py compares the plan with runs."""
    offload = "--bf16 --optimizer-cpu-offload --optimizer-offload-fraction 0.25"
    shown = pretrain(f"{RIGHT} {offload} --json {tmp_path / 'plan.json'}", code=0).stdout
    first, *_ = ranks = json.loads((tmp_path / "plan.json").read_text())["memory"]
    most = max(ranks, key=lambda rank: rank["total"])
    states = sum(most[name] for name in ("weights", "gradients", "optimizer"))
    assert f"most on pp {most['pp_rank']}: {states:,} bytes" in shown
    line = re.search(r"0.25 of optimizer states in host memory.* ([\d,]+) bytes of states, ([\d,]+) that", shown)
    assert line is not None
    on_host = sum(int(number.replace(",", "")) for number in line.groups())
    assert on_host == max(rank["host"] for rank in ranks)
    row = next(row for row in shown.splitlines() if row.startswith("  0   embedding")).split()
    assert " ".join(row[-2:]) == byte_text(first["host"])


def test_groups_are_abbreviated_at_scale() -> None:
    done = pretrain(RIGHT.replace("--world-size 8", "--world-size 4096").replace("batch-size 16", "batch-size 2048"))
    assert done.returncode == 0, done.stderr
    assert "DP 4 groups of 1024: [0,2,4,...,2046] [1,3,5,...,2047] [2048,2050,2052,...,4094] " in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) < 250


def test_a_plan_takes_no_longer_for_a_hundred_million_ranks() -> None:
    """No part of the plan iterates over all ranks, because such a loop would take minutes."""
    flags = RIGHT.replace("--world-size 8", "--world-size 100000000").replace("batch-size 16", "batch-size 50000000")
    done = pretrain(f"{flags} --device h100", code=0)
    assert "DP 4 groups of 25000000, not listed above 131,072 ranks" in done.stdout
    assert "100000000" in done.stdout and " s a step, " in done.stdout


def test_notes_go_to_stderr() -> None:
    done = pretrain(f"{RIGHT} --seed 1 --seed 2", code=0)
    assert done.stderr.startswith("--seed is given twice, with different values: ")


def test_only_the_first_rank_prints() -> None:
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    done = pretrain(WRONG, RANK="3", WORLD_SIZE="64", LOCAL_RANK="3", **address)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_vocabulary_comes_from_the_tokenizer() -> None:
    done = pretrain(f"{RIGHT.replace('--vocab-size 1000', '')} --tokenizer-type ByteTokenizer", code=0)
    assert re.search(r"vocabulary \d+, padded to 384", done.stdout)


def test_a_missing_tokenizer_is_one_problem_among_others() -> None:
    done = pretrain(f"{RIGHT} --tokenizer-type SentencePieceTokenizer --tokenizer-model /nowhere.model --tp 3", code=2)
    assert "Traceback" not in done.stderr
    assert done.stderr.count("/nowhere.model") == 1
    assert "world size 8" in done.stderr
    done = pretrain(f"{RIGHT} --tokenizer-type SentencePieceTokenizer", code=2)
    assert len(done.stderr.splitlines()) == 2, done.stderr


def test_a_plan_without_the_files_of_the_tokenizer() -> None:
    """A plan does not need the tokenizer's files, only its vocabulary size."""
    missing = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model /nowhere/tok"
    for size in ("--vocab-size", "--default-vocab-size"):
        done = pretrain(f"{RIGHT.replace('--vocab-size', size)} {missing}", code=2)
        assert "vocabulary 1,000, padded to 1,024" in done.stdout
        assert "1 problem" in done.stderr and done.stderr.count("--tokenizer-model /nowhere/tok: there is no") == 1
    done = pretrain(f"{RIGHT.replace('--vocab-size 1000', '')} {missing}", code=2)
    assert done.stdout == "" and "to plan without the tokenizer, add --vocab-size" in done.stderr


@pytest.mark.parametrize("more", ["", " --finetune"])
def test_a_plan_notes_a_checkpoint_that_only_the_run_needs(more: str, tmp_path: Path) -> None:
    done = pretrain(f"{RIGHT} --load {tmp_path}/no{more}", code=0)
    assert "parameters" in done.stdout
    assert f"--load {tmp_path}/no: does not exist and is not the --save folder; correct the path" in done.stderr


def test_missing_files_are_problems_after_the_plan(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    missing = f"--valid v={tmp_path}/y --save {tmp_path}/file --load {tmp_path}/no --exit-on-missing-checkpoint"
    flags = f"{RIGHT.replace('--mock-data', '')} {missing} --data-path {tmp_path}/x"
    done = pretrain(f"{flags} --tokenizer-type ByteTokenizer --json {tmp_path}/plan.json", code=2)
    assert "parameters" in done.stdout
    t, of_set = tmp_path, "use the prefix of the dataset, without .bin or .idx"
    text = (
        f"  --save {t}/file: {t}/file is a file, not a folder; use a folder that can be written\n"
        f"  --data-path {t}/x: there is no file {t}/x.idx; {of_set}\n"
        f"  --valid {t}/y: there is no file {t}/y.idx; {of_set}\n"
        f"  --load {t}/no: does not exist and is not the --save folder; correct the path\n"
    )
    assert done.stderr.endswith(f"This configuration cannot run: 4 problems.\n{text}")
    record = json.loads((tmp_path / "plan.json").read_text())
    assert record["plan"] and [each["text"] for each in record["problems"]] == [
        line.strip() for line in text.splitlines()
    ]
    done = pretrain(f"{flags} --tokenizer-type SentencePieceTokenizer --tokenizer-model /nowhere.model")
    assert done.returncode == 2 and "parameters" in done.stdout
    assert "5 problems." in done.stderr and "\n  --tokenizer-model /nowhere" in done.stderr
    run = flags.replace("--dry-run --world-size 8", "--cpu") + " --tp 1 --pp 1 --tokenizer-type ByteTokenizer --lr -1"
    told = pretrain(run).stderr.partition("5 problems.\n")[2].splitlines()
    assert sorted(told) == sorted(["  --lr -1.0: must be above 0; for example --lr 3e-4", *text.splitlines()])
    lists = pretrain(f"{RIGHT.replace('--mock-data', '')} --data-args-path {tmp_path}/no", code=2)
    assert f"--data-args-path {tmp_path}/no: there is no such file" in lists.stderr


def test_a_plan_as_json(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = pretrain(f"{RIGHT} --json {file}", code=0)
    record = json.loads(file.read_text())
    assert record["world_size"] == 8
    assert (record["config"]["num_layers"], record["config"]["data_parallel_size"]) == (7, 2)
    assert [f"  {line}" for lines in record["plan"].values() for line in lines] == [
        line for line in done.stdout.splitlines() if line.startswith("  ")
    ]
    assert all(record["plan"][f"Different from {name}"] for name in FOREIGN_PROGRAMS)
    refused = pretrain(f"{RIGHT} --json {file} --num-layers 0", code=2)
    (problem,) = json.loads(file.read_text())["problems"]
    assert problem["flag"] == "--num-layers" and problem["text"] in refused.stderr
    for wrong in ("--num-layer 2", "--tp 3"):  # an unknown flag, and a layout that is invalid
        refused = pretrain(f"{RIGHT} --json {wrong}", code=2)
        assert json.loads(refused.stdout)["problems"]
    refused = pretrain(f"{RIGHT} --extension {tmp_path}/nowhere.py --json", code=2)
    assert "nowhere.py" in json.loads(refused.stdout)["problems"][0]["rule"]


def test_an_interrupted_plan_ends_cleanly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrain_gpt, "prepare", interrupted)
    assert pretrain_gpt.main([*RIGHT.split()]) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


def test_a_plan_with_parameters_in_the_expert_activation() -> None:
    """If the expert activation has parameters, the backward pass of the experts calls `torch.autograd.grad`."""
    experts = "--num-experts 4 --disable-bias-linear --activation-func xielu"
    pretrain(f"{RIGHT} {experts} --sequence-parallel", code=0)


def test_a_plan_refuses_to_freeze_all_parameters() -> None:
    done = pretrain(f"{RIGHT} --freeze .")
    assert (done.returncode, done.stdout) == (2, "")
    assert "  --freeze .: matches all " in done.stderr and "leaves nothing to train" in done.stderr


def test_json_to_stdout_is_one_object_with_the_predicted_time() -> None:
    done = pretrain(f"{RIGHT} --json --device h100 --gpus-per-node 4", code=0)
    found = json.loads(done.stdout)
    time = found["time"]
    assert time["gpus_per_node"] == 4 and time["seconds"] == pytest.approx(sum(time["parts"].values()))
    assert time["bound_by"] == max(time["parts"], key=time["parts"].get)
    assert time["tokens_per_second"] == pytest.approx(16 * 128 / time["seconds"])
    assert [rank["pp_rank"] for rank in found["memory"]] == [0, 1]
    shown = pretrain(f"{RIGHT} --device h100 --gpus-per-node 4")
    assert shown.stdout.splitlines() == [
        line for title, lines in found["plan"].items() for line in (title, *(f"  {each}" for each in lines))
    ]


def test_a_device_without_a_link_that_the_layout_needs_is_refused(tmp_path: Path) -> None:
    values = yaml.safe_load((FOLDER / "h100.yaml").read_text(encoding="utf-8"))
    del values["links"]["node"]
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump(values))
    done = pretrain(f"{RIGHT} --device {own}", code=2)
    assert f"--device {own}: " in done.stderr and "has no link node, which this layout needs" in done.stderr


def test_a_plan_says_whether_it_fits() -> None:
    shown = pretrain(f"{RIGHT} --device h100 --gpus-per-node 4").stdout
    (line,) = (line for line in shown.splitlines() if "holds most" in line)
    assert line.startswith("  fits: pp ") and line.endswith(" of 79.6 GiB")
    least = json.loads(pretrain(f"{RIGHT} --json").stdout)
    assert "fits" not in least
    fullest = max(least["memory"], key=lambda rank: rank["total"])
    for size, over in ((fullest["total"], 0), (fullest["total"] - 2**20, 2**20)):
        found = json.loads(pretrain(f"{RIGHT} --device-memory {size / 2**30} --json").stdout)
        assert found["device_memory"] == size and found["bytes_over"] == over
        assert found["fits"] == (not over) and found["fullest_pp_rank"] == fullest["pp_rank"]
    shown = pretrain(f"{RIGHT} --device-memory {size / 2**30}").stdout
    assert f"  does not fit: pp {fullest['pp_rank']} holds most, " in shown


def test_a_closed_pipe_ends_a_plan_cleanly() -> None:
    command = [sys.executable, pretrain_gpt.__file__, *RIGHT.split()]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.returncode == 128 + signal.SIGPIPE and "Traceback" not in done.stderr


FULL = "standard output: cannot be written: No space left on device"


OUTPUTS = [
    (RIGHT, "> /dev/full", FULL),
    (f"{RIGHT} --json", "> /dev/full", FULL),
    (f"{RIGHT} --json --tp 8x", "> /dev/full", FULL),
    ("--help", "> /dev/full", FULL),
    ("--help", ">&-", "standard output: cannot be written: Bad file descriptor"),
    (RIGHT, ">&-", "standard output: cannot be written: Bad file descriptor"),
    (f"{RIGHT} --json plan.json", "> /dev/null", None),
]


@pytest.mark.parametrize(("flags", "redirected", "said"), OUTPUTS)
def test_full_or_closed_output_is_one_error_line(flags: str, redirected: str, said: str | None, tmp_path: Path) -> None:
    limit = "ulimit -f 1; " if said is None else ""  # limits files to 512 bytes, but not devices and pipes
    command = f"{limit}{sys.executable} {pretrain_gpt.__file__} {flags} {redirected}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == (said or "--json plan.json: cannot be written: File too large")
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr and done.stdout == ""
