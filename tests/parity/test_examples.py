"""Train every example in examples/ under several layouts, with the command from the documentation. The results are
compared with a one-process run."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

from megatron.core.batch import Batch
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.optimizers import OPTIMIZERS
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.transforms import ParameterUpdate, Place
from megatron.core.param_meta import ParamMeta
from megatron.testing.snapshot import train_in_world
from megatron.training.config.arguments import parse_args
from megatron.training.config.flags import sections, with_fields
from megatron.training.extensions import load_extensions
from tests.forked import ROOT, run_forked, run_program
from tests.gpt_cases import FP64, check_documents_apart, logits_in_parts, model_of, packed_documents, random_batch
from tests.tiny import TINY

EXAMPLES = {
    "adafactor.py": "--optimizer adafactor",
    "ademamix.py": "--optimizer ademamix --ademamix-alpha-warmup 3 --ademamix-beta3-warmup 3",
    "averaged_adam.py": "--optimizer averaged_adam --average-decay 0.9",
    "cyclic_wsd.py": "--lr-decay-style cyclic-wsd --lr-warmup-iters 1 --train-iters 3",
    "eager_1f1b.py": "--pipeline-schedule eager-1f1b",
    "head_scaled_attention.py": "--attention-module head_scaled --num-query-groups 4 --position-embedding-type rope",
    "lion.py": "--optimizer lion",
    "moving_average.py": "--experimental-attention-variant moving_average --linear-attention-freq 2",
    "goldfish_loss.py": "--loss-func goldfish --goldfish-h 3",
    "label_smoothing.py": "--loss-func label_smoothing --label-smoothing 0.2",
    "rates_by_role.py": "--role-lr embedding=3 norm=0.5 bias=0.1",
    "sandwich_norm.py": "--layer-module sandwich --normalization RMSNorm",
    "shampoo.py": "--optimizer shampoo --shampoo-interval 2",
    "streaming_dataset.py": "--dataset-type sums --tokenizer-type ByteTokenizer",
    "template.py": "--activation-func my_activation --my-slope 0.2",
    "trainable_swish.py": "--activation-func trainable_swish",
}
"""Dictionary that maps each example to the flags that select the component that the example registers."""

PART = ["dp2-to-tp2-sp-pp2-dp2"]
"""Layouts of the default run, which uses two layers. --whole runs all layouts with four layers."""

DIFFERENTIABLE = ["goldfish_loss.py", "head_scaled_attention.py", "label_smoothing.py", "sandwich_norm.py"]
DIFFERENTIABLE += ["trainable_swish.py"]
"""Examples with differentiable components. The gradients of these components are also compared with finite
differences."""


def parity(extension: Path, flags: str, rows: list[str], folder: Path) -> tuple[int, dict[str, dict[str, object]]]:
    """Run the parity command, and return its exit code and its result rows, keyed by name. `rows` contains the names of
    the layouts to compare, some of which the example itself defines."""
    path = folder / "rows.json"
    command = ["-m", "megatron.testing.parity", "--extension", extension, "--json", path]
    chosen = ["--layouts", *rows] if rows else []
    done = run_program(*command, *chosen, "--", *flags.split())
    assert path.exists(), done.stdout + done.stderr
    return done.returncode, {row["name"]: row for row in json.loads(path.read_text())}


def test_every_example_is_tested() -> None:
    there = {path.name for path in (ROOT / "examples").glob("*.py")}
    own_tests = {"early_stopping.py", "trained_share.py", "mlp_output_rms.py", "disk_space.py", "memory_storage.py"}
    assert there == EXAMPLES.keys() | own_tests | {"token_accuracy.py"}


@pytest.mark.grid("rows", [PART], [PART, []])
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_compute_the_same_under_every_layout(name: str, rows: list[str], tmp_path: Path) -> None:
    own = ["tp2-sp-pp2-dp2-eager-1f1b"] if name == "eager_1f1b.py" and rows else []
    # the ranks round the zero gradients of key biases differently
    own += ["tp2-sp"] if name == "lion.py" and rows else []
    own += ["finite-differences"] if name in DIFFERENTIABLE and rows else []
    flags = EXAMPLES[name] + (" --num-layers 2" if rows else "")
    code, found = parity(ROOT / "examples" / name, flags, rows + own, tmp_path)
    assert code == 0, found
    equal = [row for row in found.values() if row["verdict"] == "equal"]
    assert len(equal) == len(rows) + len(own) if rows else len(equal) > 15


def test_the_half_life_of_the_slow_average_rises_linearly() -> None:
    load_extensions([str(ROOT / "examples" / "ademamix.py")])
    options = sections()["AdEMAMix"](ademamix_alpha=8.0, ademamix_beta3_warmup=100, ademamix_alpha_warmup=50)

    def half_life(beta: float) -> float:
        return math.log(0.5) / math.log(beta)

    first, last = half_life(0.9), half_life(0.9999)
    for step, share in (1, 0.01), (50, 0.5), (100, 1.0), (1000, 1.0):
        alpha, beta3 = options.at(torch.tensor(float(step), dtype=torch.float64), 0.9)
        assert float(alpha) == pytest.approx(8 * min(1.0, step / 50))
        assert half_life(float(beta3)) == pytest.approx(first + share * (last - first))


def test_lion_steps_by_the_sign_of_an_average() -> None:
    load_extensions([str(ROOT / "examples" / "lion.py")])
    meta = ParamMeta("decoder.layers.0.mlp.linear_fc1.weight", (5,), role="bias")
    place = Place(((0,), (5,)), (0, 5), True, {})
    gradients = torch.randn(3, 5, dtype=torch.float64)
    param = torch.ones(5, dtype=torch.float64)
    average, expected, written_out = torch.zeros_like(param), param.clone(), torch.zeros_like(param)
    for grad in gradients:
        x = ParameterUpdate(meta, param, grad, {"exp_avg": average}, place, (0.1, 0.3, torch.tensor(1.0)))
        for link in OPTIMIZERS["lion"](OptimizerConfig(), meta):
            link.update(x)
        param = param + x.update
        expected = expected - 0.1 * ((0.95 * written_out + 0.05 * grad).sign() + 0.3 * expected)
        written_out = 0.98 * written_out + 0.02 * grad
    torch.testing.assert_close((param, average), (expected, written_out))


def test_rates_follow_the_table_of_roles() -> None:
    """In its first step, Adam changes a parameter by the learning rate times a direction that depends only on the
    gradient."""
    flags = f"{TINY} --fp64 --attention-dropout 0 --hidden-dropout 0 --weight-decay 0 --lr-decay-style constant"
    table = {"embedding": 3.0, "norm": 0.5, "bias": 0.1}
    own = [*f"{flags} --extension {ROOT}/examples/rates_by_role.py --role-lr".split()]
    own += [f"{role}={factor}" for role, factor in table.items()]
    found = train_in_world(1, own).tensors
    plain = train_in_world(1, flags.split()).tensors
    roles = {name: meta.role for name, (_, meta) in GPTModel(parse_args(own).model).named_metas().items()}
    assert set(roles.values()) == {"hidden", *table}
    for name, role in roles.items():
        initial = found[f"initial weight {name}"]
        assert initial.equal(plain[f"initial weight {name}"])
        moved, expected = (each[f"step 1 weight {name}"] - initial for each in (found, plain))
        torch.testing.assert_close(moved, table.get(role, 1.0) * expected, rtol=1e-9, atol=1e-12)


def test_a_table_of_roles_is_checked() -> None:
    flags = ["--extension", "examples/rates_by_role.py", "--role-lr"]
    done = run_program("pretrain_gpt.py", *MODEL.split(), *flags, "norm", code=2)
    assert "--role-lr norm: must be ROLE=NUMBER; write for example --role-lr embedding=10 norm=0.5" in done.stderr
    for more in [], ["--dry-run"]:
        done = run_program("pretrain_gpt.py", *MODEL.split(), *flags, "norms=2", *more)
        rule = "--role-lr norms: no parameter of the model has this role; its roles are bias, embedding, hidden, norm"
        assert done.returncode and rule in done.stdout + done.stderr


@pytest.mark.parametrize("name", ["adafactor", "shampoo"])
def test_chain_states_resume(name: str, tmp_path: Path) -> None:
    """If a run is resumed, its result is bit-identical under the same layout, and equal up to rounding under a
    different layout."""
    flags = f"{TINY} --extension examples/{name}.py --optimizer {name} --fp64 --num-attention-heads 4 --seq-length 16 "
    flags += "--vocab-size 64 --hidden-size 32 --eval-iters 0 --lr 1e-2 --log-interval 1 --train-iters 4 "
    flags += "--disable-bias-linear --lr-decay-style constant"

    def losses(layout: str, more: str = "") -> list[tuple[float, float]]:
        metrics = tmp_path / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        run_forked(2, [*f"{flags} {layout} {more} --metrics-file {metrics}".split()], tmp_path / "screen")
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        return [(record["lm_loss"], record["grad_norm"]) for record in records if "grad_norm" in record]

    whole = losses("")
    assert len(whole) == 4
    assert losses("", f"--save {tmp_path}/saved --exit-interval 2") == whole[:2]
    assert losses("", f"--load {tmp_path}/saved") == whole[2:]
    for layout in "--tp 2", "--pp 2":
        elsewhere = losses(layout, f"--load {tmp_path}/saved")
        assert sum(elsewhere, ()) == pytest.approx(sum(whole[2:], ()), rel=1e-9)


def test_a_custom_mixer_has_a_pattern_letter_and_generates_text() -> None:
    """The example also supports packed documents, and generation from texts that are passed in several parts."""
    load_extensions([str(ROOT / "examples" / "moving_average.py")])
    config = with_fields(model_of("llama"), {"num_layers": 4, "hybrid_layer_pattern": "A-*A"})
    assert [kind.linear for kind in config.layers] == ["moving_average", None, None, "moving_average"]
    model, batch = GPTModel(config, FP64).eval(), random_batch(config, **packed_documents(config))
    whole = model.logits(None, Batch.of_tokens(batch.tokens))
    torch.testing.assert_close(logits_in_parts(model, batch.tokens, (1, 6, 9))[0], whole, rtol=1e-12, atol=1e-12)
    check_documents_apart(model, batch)


def test_a_custom_attention_generates_and_equals_self_attention_with_factors_of_one() -> None:
    load_extensions([str(ROOT / "examples" / "head_scaled_attention.py")])
    plain = with_fields(model_of("llama"), {"qk_layernorm": False})
    config = with_fields(plain, {"attention_module": "head_scaled"})
    model, batch = GPTModel(config, FP64).eval(), random_batch(config, **packed_documents(config))
    own = dict(model.named_parameters())
    renamed = {"qkv": "linear_qkv", "proj": "linear_proj"}
    with torch.no_grad():
        built_in = GPTModel(plain, FP64).eval()
        for name, value in built_in.named_parameters():
            mine = next((name.replace(new, old) for old, new in renamed.items() if new in name), name)
            value.copy_(own[mine])
        tokens = Batch.of_tokens(batch.tokens)
        whole = model.logits(None, tokens)
        torch.testing.assert_close(whole, built_in.logits(None, tokens), rtol=1e-12, atol=1e-12)
        next(value for name, value in own.items() if name.endswith("scales")).mul_(2)
        whole = model.logits(None, tokens)
        assert not torch.allclose(whole, built_in.logits(None, tokens))
    torch.testing.assert_close(logits_in_parts(model, batch.tokens, (1, 6, 9))[0], whole, rtol=1e-12, atol=1e-12)
    check_documents_apart(model, batch)


MODEL = f"{TINY} --log-interval 1"


def test_each_component_of_the_template_works(tmp_path: Path) -> None:
    flags = "--extension examples/template.py --activation-func my_activation --my-interval"
    out, _ = train(f"{flags} 2", tmp_path)
    assert [line for line in out.splitlines() if "my callback" in line] == [
        " my callback: 8 samples so far", " my callback: 16 samples so far"
    ]  # fmt: skip
    done = run_program("pretrain_gpt.py", *MODEL.split(), *flags.split(), "9", code=2)
    assert "--my-interval 9: is beyond the last iteration, --train-iters 4" in done.stderr


def train(flags: str, folder: Path) -> tuple[str, list[dict[str, float]]]:
    """Train in one process, and return the printed output and the logged metrics."""
    metrics = folder / "metrics.jsonl"
    done = run_program("pretrain_gpt.py", *MODEL.split(), *flags.split(), "--metrics-file", metrics, code=0)
    return done.stdout, [json.loads(line) for line in metrics.read_text().splitlines()]


def test_early_stopping_and_a_custom_metric_work(tmp_path: Path) -> None:
    """The learning rate is so small that the loss does not improve after the first evaluation. The loss excludes one in
    four tokens."""
    flags = (
        "--extension examples/early_stopping.py examples/trained_share.py examples/goldfish_loss.py "
        "--loss-func goldfish --goldfish-h 3 --lr 1e-30 --train-iters 9 --eval-interval 1 --eval-iters 1 "
        "--patience 2"
    )
    out, records = train(flags, tmp_path)
    stopped = re.search(r"exiting at iteration (\d): the validation loss has not fallen below", out)
    assert stopped is not None and int(stopped[1]) < 9
    shares = [record["trained_share"] for record in records if "trained_share" in record]
    assert len(shares) == int(stopped[1]) and all(0.5 < share < 0.95 for share in shares)


def test_early_stopping_resumes_its_state_under_another_layout(tmp_path: Path) -> None:
    flags = (
        f"{MODEL} --extension examples/early_stopping.py --lr 1e-30 --train-iters 9 --eval-interval 1 --eval-iters 1"
    )
    flags += f" --seq-length 16 --vocab-size 64 --num-attention-heads 2 --patience 4 --save {tmp_path}"
    early = "exiting at iteration 4: --exit-interval 4"
    assert early in run_forked(2, [*flags.split(), "--pp", "2", "--exit-interval", "4"], tmp_path / "screen")
    saved = json.loads((tmp_path / "iter_0000004" / "metadata.json").read_text())["callbacks"]
    best, without = saved["early stopping"]
    assert best > 0 and without > 0
    done = run_program("pretrain_gpt.py", *flags.split(), "--load", tmp_path, code=0)
    assert f"exiting at iteration {4 + 4 - without}: the validation loss has not fallen" in done.stdout


def test_a_meter_counts_the_same_under_every_layout(tmp_path: Path) -> None:
    flags = "--extension examples/mlp_output_rms.py --lr 1e-2 --train-iters 3 --eval-iters 1 --fp32 "
    flags += "--eval-interval 1"
    _, one = train(flags, tmp_path)
    metrics = tmp_path / "four.jsonl"
    four = [*MODEL.split(), *flags.split(), "--tp", "2", "--pp", "2", "--metrics-file", str(metrics)]
    run_forked(4, four, tmp_path / "screen")
    found = [
        [record["mlp_output_rms"] for record in records if "mlp_output_rms" in record]
        for records in (one, map(json.loads, metrics.read_text().splitlines()))
    ]
    assert len(found[0]) == 3 and found[1] == pytest.approx(found[0], rel=1e-5)


def test_a_task_ends_a_run_before_the_disk_is_full(tmp_path: Path) -> None:
    flags = "--extension examples/disk_space.py --lr 1e-2 --train-iters 9 --eval-iters 0 --disk-space-interval 2"
    out, records = train(f"{flags} --least-free-gib 1e9 --save {tmp_path}", tmp_path)
    assert re.search(r"exiting at iteration 2: \d+ GiB are free in --save, less than --least-free-gib 1e\+09", out)
    assert "saved checkpoint at iteration 2" in out
    assert [record["iteration"] for record in records if "free_gib" in record] == [2]
    done = run_program("pretrain_gpt.py", *MODEL.split(), *flags.split(), "--least-free-gib", "1", code=2)
    assert "--least-free-gib: looks at the folder of --save; add --save" in done.stderr


def test_parameters_can_be_frozen_by_a_configuration_file(tmp_path: Path) -> None:
    """The loss is the same with and without frozen parameters, but frozen parameters do not contribute to the gradient
    norm."""
    flags = "--num-layers 3 --lr 1e-2 --train-iters 2 --eval-iters 0"
    (tmp_path / "free").mkdir()
    _, frozen = train(f"--config examples/freeze_embedding.yaml {flags}", tmp_path)
    _, free = train(flags, tmp_path / "free")
    assert frozen[0]["lm_loss"] == free[0]["lm_loss"] and frozen[0]["grad_norm"] < free[0]["grad_norm"]
