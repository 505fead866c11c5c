"""Tests of `pretrain_gpt.py --load HF_FOLDER` (flags from config.json, loading under any layout, resuming) and of
--export-hf-interval."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing.path_kind import refusal as refusal_of
from megatron.extensions.interop.hugging_face.continued_training.pretrained import with_pretrained_flags
from megatron.extensions.interop.hugging_face.export import COUNTS, ExportProcess, HFExporter
from megatron.extensions.interop.hugging_face.flags import HuggingFaceConfig
from megatron.extensions.interop.hugging_face.rules import exports
from megatron.training.config.arguments import command_line, parse_args
from megatron.training.config.prepare import prepare
from megatron.training.config.reading import FlagReader
from megatron.training.config.run_config import CheckpointConfig, RunConfig
from megatron.training.config.saved_flags import with_saved_flags
from megatron.training.metrics import progress_bar
from megatron.training.reliability.failure_report import start_again
from megatron.training.reliability.launch import Launch
from tests.extensions.hugging_face import sweep
from tests.extensions.hugging_face.hf_exact import model_with, save_model
from tests.extensions.hugging_face.hf_models import assert_same_weights, weights_in
from tests.forked import run_forked
from tests.gpt_cases import GPT
from tests.pure.test_path_kind import LATEST, check_kind
from tools import compare_layouts, convert_checkpoint, generate_text, inspect_checkpoint

pytest.importorskip("transformers")

TRAINING = """--cpu --mock-data --seq-length 16 --global-batch-size 4 --lr 1e-30 --eval-iters 0 --num-workers 0
    --log-interval 1 --train-iters"""


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("mixtral-window", tmp_path_factory.mktemp("models") / "mixtral")


def test_training_under_a_layout_exports_and_resumes(mixtral: Path, tmp_path: Path) -> None:
    """The learning rate is too small to change any weight, so the exported weights equal the loaded weights."""
    run = tmp_path / "run"
    files = ["--load", str(mixtral), "--save", str(run), "--save-interval", "1", "--keep-last", "1"]
    flags = [*files, "--export-hf-interval", "2", *TRAINING.split()]
    layout = "--tp 2 --pp 2 --ep 2 --etp 1 --sequence-parallel".split()
    screen = run_forked(4, [*flags, "2", *layout], tmp_path / "screen")
    assert f"--load {mixtral} is a Hugging Face model (mixtral)" in screen
    assert f"loaded weights from {mixtral}: starting at iteration 0 with a fresh optimizer" in screen
    assert "no checkpoint" not in screen
    assert f"exported {run}/iter_0000002 to {run}/hf/iter_0000002" in screen
    assert_same_weights(mixtral, run / "hf/iter_0000002")
    assert sorted(path.name for path in (run / "hf").iterdir()) == ["iter_0000002"]
    screen = run_forked(1, [*flags, "3"], tmp_path / "again")
    resumed = f"from {run} (--save), not the model in --load {mixtral}: starting at iteration 2"
    assert screen.count("loaded ") == 1 and f"loaded checkpoint of iteration 2 {resumed}" in screen
    assert len(re.findall(r"^ *iteration .*3/", screen, re.MULTILINE)) == 1, screen


def test_tools_accept_the_folder(mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The generated text is the same for the folder and its converted checkpoint, and under every layout."""
    ours = tmp_path / "ours"
    convert_checkpoint.main(["--input", str(mixtral), "--output", str(ours)])
    capsys.readouterr()
    texts = []
    for load in (mixtral, ours):
        flags = ["--load", str(load), "--device", "cpu", "--tokenizer-type", "NullTokenizer", "--max-new-tokens", "9"]
        assert generate_text.main([*flags, "--prompt", "5 7 11"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""
    assert inspect_checkpoint.main([str(mixtral)]) == 0
    assert "format             hf (mixtral)" in capsys.readouterr().out
    assert inspect_checkpoint.main([str(mixtral), str(ours)]) == 0
    assert "bit for bit" in capsys.readouterr().out
    flags = ["--load", str(mixtral), "--lr", "1e-3", "--seq-length", "8"]
    assert compare_layouts.main(["--a", "", "--b", "--tp 2 --sequence-parallel", "--steps", "1", "--", *flags]) == 0


def refusal(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    with pytest.raises(SystemExit):
        command_line([str(word) for word in words])
    return capsys.readouterr().err


def test_a_model_folder_with_saved_checkpoints_still_gives_the_model(mixtral: Path, tmp_path: Path) -> None:
    """Repeating the command resumes a run that saves to the folder from which it loads."""
    (tmp_path / "config.json").write_bytes((mixtral / "config.json").read_bytes())
    check_kind(tmp_path, f"{LATEST} iter_0000001/metadata.json", "", "checkpoints")
    flags = ["--lr", "1", "--mock-data", "--train-iters", "2", "--seq-length", "16", "--load", str(tmp_path)]
    assert command_line(flags).config.model.num_layers == 3


def test_contradicting_flags_are_named_with_both_values(mixtral: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--lr 1 --mock-data --train-iters 1 --seq-length 16".split()
    equal = "--num-layers 3 --swiglu --hidden-dropout 0.3 --num-query-groups 2 --kv-channels 8 --bf16".split()
    config = command_line([*flags, *equal, "--load", str(mixtral)]).config
    assert (config.model.hidden_size, config.model.hidden_dropout, config.model.seq_length) == (32, 0.3, 16)
    assert (config.model.num_experts, config.model.window_size, config.model.vocab_size) == (4, 5, 83)
    assert with_saved_flags(command_line([*flags, "--use-checkpoint-args", "--load", str(mixtral)]).config)[1] == []
    said = refusal(capsys, *flags, "--num-layers", "4", "--squared-relu", "--load", mixtral)
    assert f"--num-layers 4: is 3 in {mixtral}/config.json" in said and "--squared-relu" in said
    assert len(said.strip().splitlines()) == 3, said
    (broken := mixtral.with_name("broken")).mkdir()
    (broken / "config.json").write_text('{"model_type": "llama", "hidden_size": null}')
    said = refusal(capsys, *flags, "--load", broken)
    assert (
        "config.json of model_type llama: " in said
        and "hidden_size = None must be a number" in said
        and "required" not in said
    )


def test_no_notice_mentions_a_flag_that_was_not_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The config.json of Falcon-H1 has the key mamba_norm_before_gate even if the model does not have the norm that
    this key describes."""
    config = json.loads(FALCON_H1) | {"model_type": "falcon_h1", "architectures": ["FalconH1ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = f"--lr 1 --mock-data --train-iters 1 --seq-length 16 --cpu --load {tmp_path}".split()
    for own, told in ((), False), (("--expert-model-parallel-size", "2"), True):
        prepare(command_line([*flags, *own]), Launch())
        said = capsys.readouterr().err
        assert "--mamba-norm-before-gate" not in said and ("has no effect" in said) == told, said


FALCON_H1 = """{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
"vocab_size": 64, "head_dim": 8, "intermediate_size": 64,
"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
"mamba_n_groups": 1, "max_position_embeddings": 64}"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a Llama model with 32 positions, and return its folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("models") / "llama"
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"vocab_size": 83, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 32}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, rope_theta=10000.0)).save_pretrained(path)
    return path


def test_continued_training_at_a_longer_context_exports_its_positions(llama: Path, tmp_path: Path) -> None:
    """transformers loads the exported folder, and repeating the command resumes the run."""
    from transformers import AutoModelForCausalLM

    run, iters = tmp_path / "run", TRAINING.replace("--seq-length 16", "--attention-dropout 0 --hidden-dropout 0")
    lengthened = f"--load {llama} --seq-length 64 --rotary-base 500000"
    flags = f"{lengthened} --save {run} --save-interval 1 {iters}".split()
    screen = run_forked(1, [*flags, "1", "--export-hf-interval", "1"], tmp_path / "screen")
    assert "--rotary-base 10000 -> 500000, --max-position-embeddings 32 -> 64; checkpoints and exports" in screen
    exported = AutoModelForCausalLM.from_pretrained(run / "hf/iter_0000001")
    assert exported.config.max_position_embeddings == 64
    assert exported.config.rope_parameters["rope_theta"] == 500000.0
    assert_same_weights(llama, run / "hf/iter_0000001")
    assert "starting at iteration 1" in run_forked(1, [*flags, "2"], tmp_path / "again")


@pytest.mark.parametrize(
    ("scaling", "flags", "expected"),
    [
        (None, "--rope-type yarn --rotary-scaling-factor 2", "yarn: yarn True, 2 of 32, llama3 False, linear None"),
        (None, "--use-rope-scaling", "llama3: yarn False, 1 of 32, llama3 True, linear None"),
        ("llama3", "--rope-type yarn --rotary-scaling-factor 4", "yarn: yarn True, 4 of 16, llama3 False, linear None"),
        ("llama3", "--rope-scaling-factor 4", "llama3: yarn False, 1 of 16, llama3 True, linear None"),
        ("linear", "--rope-type yarn --rotary-scaling-factor 4", "yarn: yarn True, 4 of 16, llama3 False, linear None"),
        (
            "linear",
            "--rotary-seq-len-interpolation-factor 4",
            "linear: yarn False, 1 of 4096, llama3 False, linear 4.0",
        ),
        ("yarn", "--rotary-scaling-factor 4", "yarn: yarn True, 4 of 16, llama3 False, linear None"),
        ("yarn", "--rope-type rope --rotary-base 1e6", "none: yarn False, 2 of 16, llama3 False, linear None"),
    ],
)
def test_a_given_scaling_replaces_that_of_the_folder(
    llama: Path, tmp_path: Path, scaling: str | None, flags: str, expected: str
) -> None:
    config = json.loads((llama / "config.json").read_text())
    if scaling is not None:
        factors = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if scaling == "llama3" else {}
        original = {} if scaling == "linear" else {"original_max_position_embeddings": 16}
        config["rope_parameters"] |= {"rope_type": scaling, "factor": 2.0, **factors, **original}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = f"--lr 1 --mock-data --train-iters 1 --seq-length 64 --load {tmp_path} {flags}".split()
    command = command_line(words)
    (notice,) = [note for note in command.notes if "changes the positions of" in note]
    assert "--max-position-embeddings 32 -> 64" in notice
    model, kind = command.config.model, expected.partition(":")[0]
    original = model.rope_scaling_original_max_position_embeddings if kind == "llama3" else None
    shown = (
        f"yarn {model.yarn}, {model.rotary_scaling_factor:g} of {original or model.original_max_position_embeddings}"
    )
    shown += f", llama3 {model.use_rope_scaling}, linear {model.rotary_seq_len_interpolation_factor}"
    assert f"{kind}: {shown}" == expected


def test_sequences_beyond_the_folders_positions_need_a_flag(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"--lr 1 --mock-data --train-iters 1 --seq-length 64 --load {llama}".split()
    remedy = "add --max-position-embeddings 64 to train on longer sequences, and usually a larger --rotary-base, or"
    for given in ((), ("--rotary-base", "10000"), ("--rotary-scaling-factor", "8")):
        said = refusal(capsys, *flags, *given)
        assert f"--seq-length 64: is above max_position_embeddings 32 in {llama}/config.json; {remedy}" in said
        assert len(said.strip().splitlines()) == 2, said
    assert command_line([*flags, "--max-position-embeddings", "128"]).config.model.max_position_embeddings == 128
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_positions": 32, "n_layer": 1}))
    said = refusal(capsys, *flags, "--load", tmp_path)
    assert "the number of rows of the learned table; nearest: 32" in said and len(said.strip().splitlines()) == 2, said


def test_checkpoints_take_precedence_over_a_folder(tmp_path: Path) -> None:
    check_kind(tmp_path, "config.json metrics.jsonl", "", "hugging_face")
    assert refusal_of(tmp_path / "config.json").endswith(f"did you mean its folder, {tmp_path}?")
    save = tmp_path / "save"
    check_kind(save, LATEST, "", "checkpoints")
    again = start_again(CheckpointConfig(save=str(save), load=str(tmp_path)))
    assert again.endswith(f"it resumes from the latest checkpoint in --save {save}")
    check_kind(tmp_path, f"{LATEST} iter_0000000/metadata.json", "", "checkpoints")


def test_a_folder_of_exports_is_not_a_damaged_checkpoint(tmp_path: Path) -> None:
    check_kind(tmp_path / "hf", "iter_0000002/config.json iter_0000004/config.json", "", "hugging_face_exports")
    check_kind(tmp_path / "both", f"{LATEST} iter_0000002/config.json", "", "checkpoints")


def test_flags_of_an_extension_leave_the_tokenizer_of_the_folder(mixtral: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((mixtral / "config.json").read_bytes())
    (tmp_path / "tokenizer.model").touch()
    config = RunConfig(checkpoint=CheckpointConfig(load=str(tmp_path)), extension_options=(FlagReader,))
    assert with_pretrained_flags(config, FlagReader()).tokenizer.tokenizer_model == f"{tmp_path}/tokenizer.model"


def test_a_folder_in_16_bits_is_not_silently_trained_in_32(mixtral: Path, tmp_path: Path) -> None:
    config = json.loads((mixtral / "config.json").read_text())

    def notices(flags: str, **dtype: str) -> list[str]:
        config.pop("dtype", None)
        (tmp_path / "config.json").write_text(json.dumps(config | dtype))
        words = f"--lr 1 --mock-data --train-iters 1 --seq-length 16 --load {tmp_path} {flags}".split()
        return [note for note in command_line(words).notes if "float32" in note]

    (notice,) = notices("", dtype="bfloat16")
    assert "has weights in bfloat16" in notice and "add --bf16 to keep this format, or --fp32 to confirm" in notice
    assert "add --fp16" in notices("", torch_dtype="float16")[0]
    assert not notices("", dtype="float32") + notices("--bf16", dtype="bfloat16") + notices("--fp32", dtype="bfloat16")


def test_a_smaller_vocabulary_is_refused(mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--load", str(mixtral), *TRAINING.split(), "1", "--vocab-size", "80"]
    said = refusal(capsys, *flags)
    assert f"--vocab-size 80: is 83 in {mixtral}/config.json; remove the flag" in said
    assert "a larger value adds tokens" in said
    screen = run_forked(1, [*flags, "--tokenizer-type", "NullTokenizer"], tmp_path / "screen", code=2)
    assert "has a vocabulary of 83 tokens, but the run's has 80" in screen and "give --vocab-size 83 or more" in screen


def means_of_columns(rows: torch.Tensor) -> torch.Tensor:
    """Return the mean over the first dim of rows [n, ...], computed exactly and rounded to fp32."""
    columns = rows.double().flatten(1).T if rows.ndim > 1 else rows.double()[None]
    means = [math.fsum(column.tolist()) / len(rows) for column in columns]
    return torch.tensor(means, dtype=torch.float64).float().reshape(rows.shape[1:])


ADDED = {
    "llama": "--tp 2 --sequence-parallel",
    "gpt2": "--pp 2",
    "gemma": "--tp 2 --pp 2 --sequence-parallel",
    "qwen2": "",
    "phi": "--tp 2",
}
"""Layout under which each family is tested. The families cover tied and untied embeddings, and one family has an output
bias."""


@pytest.mark.parametrize("family", ADDED)
def test_new_tokens_start_at_the_mean(family: str, tmp_path: Path) -> None:
    """The vocabulary of 300 tokens is padded to 384, so both ranks of TP 2 have new rows."""
    folder, run = tmp_path / family, tmp_path / "run"
    model_with(family, sweep.tiny(family)).float().save_pretrained(folder)
    files = f"--load {folder} --save {run} --save-interval 1 --export-hf-interval 1 --vocab-size 300"
    ranks = 4 if "--pp" in ADDED[family] and "--tp" in ADDED[family] else 2 if ADDED[family] else 1
    screen = run_forked(ranks, f"{files} {ADDED[family]} {TRAINING} 1".split(), tmp_path / "screen")
    before, after = weights_in(folder), weights_in(run / "hf/iter_0000001")
    old = json.loads((folder / "config.json").read_text())["vocab_size"]
    said = f"{300 - old} new tokens (from id {old}): rows set to the mean of {old} rows, all rows of the folder"
    assert said in screen
    assert json.loads((run / "hf/iter_0000001/config.json").read_text())["vocab_size"] == 300
    grown = [name for name, value in before.items() if after[name].shape != value.shape]
    assert len(grown) == {"phi": 3, "llama": 2, "qwen2": 2}.get(family, 1), grown
    for name, value in before.items():
        assert torch.equal(after[name][: len(value)], value), name
        if name in grown:
            assert torch.equal(after[name][old:], means_of_columns(value).expand(300 - old, *value.shape[1:])), name


def test_new_tokens_may_be_initialized_randomly(llama: Path, tmp_path: Path) -> None:
    """The embedding rows of new tokens are the same under each layout, in the weights and in the optimizer's main
    parameters."""
    runs = [tmp_path / "one", tmp_path / "two"]
    for ranks, run in enumerate(runs, 1):
        flags = f"--load {llama} --save {run} --save-interval 1 --vocab-size 300 --new-token-init normal --bf16 --tp"
        screen = run_forked(ranks, f"{flags} {ranks} {TRAINING} 1".split(), tmp_path / f"screen{ranks}")
        assert "217 new tokens (from id 83): rows drawn as in a new model" in screen
        convert = ["--input", str(run), "--output", str(tmp_path / f"hf{ranks}"), "--dtype", "float32"]
        convert_checkpoint.main(convert)
    assert_same_weights(tmp_path / "hf1", tmp_path / "hf2")
    rows = weights_in(tmp_path / "hf1")["lm_head.weight"][83:]
    assert 0.015 < rows.std() < 0.025 and rows.unique(dim=0).shape == rows.shape


def test_a_tokenizer_with_added_tokens_is_exported_with_their_rows(llama: Path, tmp_path: Path) -> None:
    """New embedding rows are initialized to the mean of the rows that have a token. Padding rows of the embedding are
    excluded from the mean."""
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    shutil.copytree(llama, tmp_path / "llama")
    words = {"<eos>": 0} | {f"w{number}": number for number in range(1, 80)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w1")), eos_token="<eos>"
    )
    tokenizer.save_pretrained(tmp_path / "llama")
    assert tokenizer.add_tokens([f"<new{number}>" for number in range(9)]) == 9
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    run, given = tmp_path / "run", f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}/tokenizer"
    flags = f"--load {tmp_path}/llama --save {run} --save-interval 1 --export-hf-interval 1 {given} {TRAINING} 1"
    screen = run_forked(1, flags.split(), tmp_path / "screen")
    assert "6 new tokens (from id 83): rows set to the mean of 80 rows, the tokens of the folder's" in screen
    assert "rows 80 to 82 are padding in the folder and keep the folder's values" in screen
    exported = run / "hf/iter_0000001"
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert model.config.vocab_size == 89
    assert PreTrainedTokenizerFast.from_pretrained(exported).convert_tokens_to_ids("<new8>") == 88
    head = weights_in(tmp_path / "llama")["lm_head.weight"]
    assert torch.equal(weights_in(exported)["lm_head.weight"][83:], means_of_columns(head[:80]).expand(6, -1))


def test_exports_require_saves_at_the_same_iterations(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def problem(flags: str) -> str:
        return "; ".join(map(str, exports(parse_args(flags.split()), 1)))

    assert "multiple of --save-interval 3; nearest: 6" in problem("--save x --save-interval 3 --export-hf-interval 7")
    assert "add --save-interval 7" in problem("--save x --export-hf-interval 7")
    assert problem("--save x --save-interval 3 --export-hf-interval 6") == ""
    model = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 64"
    export = f"{model} --save x --save-interval 3 --export-hf-interval 3"
    assert problem(export) == ""
    refused = problem(f"{export} --activation-func squared_relu")
    assert "--export-hf-interval 3: no Hugging Face family can express this model" in refused
    assert "model_type gpt2 cannot have activation_func = 'squared_relu'; change the model or remove" in refused
    assert problem(f"{export} --hf-family gpt2") == ""
    assert "--hf-family llama: model_type llama cannot have" in problem(f"{export} --hf-family llama")
    assert "--hf-family: gpt3: is not a Hugging Face family; nearest: gptj" in problem(f"{export} --hf-family gpt3")
    unused = "--hf-family gpt2: selects the family of exports, but the run exports nothing; add --export-hf-interval"
    assert unused in problem(f"{model} --hf-family gpt2")


def test_a_run_exports_to_its_original_family(tmp_path: Path) -> None:
    """The export keeps the token ids of the original config.json, even after the run is resumed, or if another run
    loads the weights."""
    ids = {"bos_token_id": 5, "eos_token_id": 0, "pad_token_id": 7}
    model_with("opt", sweep.tiny("opt") | ids).float().save_pretrained(tmp_path / "opt")
    run, other = tmp_path / "run", tmp_path / "other"
    exports = ["--save-interval", "1", "--export-hf-interval", "1", "--tokenizer-type", "NullTokenizer"]
    first = ["--load", str(tmp_path / "opt"), "--save", str(run), *exports, *TRAINING.split()]
    run_forked(1, [*first, "1"], tmp_path / "screen")
    run_forked(1, [*first, "2"], tmp_path / "again")
    convert_checkpoint.main(["--input", str(run), "--output", str(tmp_path / "back")])
    saved = ["--load", str(run), "--use-checkpoint-args", "--finetune", "--save", str(other), *exports]
    run_forked(1, [*saved, *TRAINING.split(), "1"], tmp_path / "finetuned")
    folders = [run / "hf/iter_0000001", run / "hf/iter_0000002", other / "hf/iter_0000001", tmp_path / "back"]
    for folder in folders:
        written = json.loads((folder / "config.json").read_text())
        assert {key: written.get(key) for key in (*ids, "model_type")} == {**ids, "model_type": "opt"}, folder
        assert_same_weights(tmp_path / "opt", folder)
    screen = run_forked(1, [*saved, *TRAINING.split(), "2", "--hf-family", "biogpt"], tmp_path / "named")
    assert json.loads((other / "hf/iter_0000002/config.json").read_text())["model_type"] == "biogpt", screen


def test_a_failed_or_terminated_export_is_reported(tmp_path: Path) -> None:
    config = RunConfig(model=GPT, checkpoint=CheckpointConfig(save=str(tmp_path)))
    held: list[Path] = []
    exporter = HFExporter(config.with_options(HuggingFaceConfig(export_hf_interval=2)), held)
    (tmp_path / "iter_0000002").mkdir()
    exporter.add(1, tmp_path / "iter_0000001")
    exporter.add(2, tmp_path / "iter_0000002")
    assert held == [tmp_path / "iter_0000002"] and exporter.poll() == []
    (line,) = exporter.poll(wait=True)
    assert "iter_0000002 was not exported: " in line and "is an empty folder" in line and held == []
    exporter.add(6, tmp_path / "iter_0000006")
    exporter.poll()
    assert exporter.abandon() == [f"{tmp_path}/hf/iter_0000006 was not exported: the run stops"]


def test_the_end_of_a_run_shows_the_progress_of_its_export(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The export process writes half of its bytes and then pauses for longer than the interval between two progress
    lines."""
    program = f"import os, sys, time; os.pwrite({{}}, {COUNTS.pack(50, 100)!r}, 0); time.sleep(1.5); print('done')"
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda command, **options: popen(
            [sys.executable, "-S", "-c", program.format(command[-1].removeprefix("--counts="))], **options
        ),
    )
    monkeypatch.setattr(progress_bar, "SECONDS_BETWEEN_LINES", 0.1)
    process = ExportProcess(tmp_path / "iter_0000002", tmp_path / "hf", ())
    assert process.wait() == (0, ["done"]) and process.ended()
    assert re.match(r" exporting iter_0000002: 50% after \d+ s, \d+ s left\n", capsys.readouterr().out)


def test_a_converted_run_in_bf16_exports_what_it_trains(mixtral: Path, tmp_path: Path) -> None:
    flags = ["--load", str(mixtral), "--save", str(tmp_path / "run"), "--bf16", *TRAINING.split(), "1"]
    run_forked(2, flags, tmp_path / "screen")
    convert_checkpoint.main(["--input", str(tmp_path / "run"), "--output", str(tmp_path / "hf"), "--dtype", "float32"])
    # the main parameters of the optimizer were initialized from the fp32 files
    assert_same_weights(mixtral, tmp_path / "hf")
    convert_checkpoint.main(["--input", str(tmp_path / "run"), "--output", str(tmp_path / "bf16")])
    narrow = weights_in(tmp_path / "bf16")
    assert all(torch.equal(value.bfloat16(), narrow[name]) for name, value in weights_in(mixtral).items())
