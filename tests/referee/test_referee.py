"""tools/referee.py judges transformers models whose backward passes contain planted faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from megatron.core.distributed import finalize_model_grads
from megatron.extensions import load
from megatron.testing.local_run import local_run
from megatron.testing.local_world import run_world
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve_legal
from megatron.training.train_step import train_step
from tools import referee

load()
SHAPE = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 32},
}


@dataclass
class Other:
    """Simulation of another training program, with a transformers model, a batch, and planted changes to the
    gradients."""

    model: PreTrainedModel
    folder: Path
    by_files: bool = False
    """True if gradients are written as a folder of files, in the same format as weights."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    """Inputs of the model and arrays of the batch file, in addition to tokens and labels."""

    ids: Tensor = field(
        default_factory=lambda: torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(3))
    )

    def judged(
        self, plant: Callable[[dict[str, Tensor]], object] = lambda grads: None, *more: str
    ) -> dict[str, object]:
        """Run a backward pass, change the gradients with `plant`, and return the referee's judgement."""
        labels = self.ids.clone()
        labels[0, :6] = -100
        self.model.zero_grad()
        loss = self.model(input_ids=self.ids, labels=labels, **self.inputs).loss
        loss.backward()
        gradients = {name: param.grad.clone() for name, param in self.model.named_parameters()}
        plant(gradients)
        files = {name: self.folder / name for name in ("batch.npz", "gradients.safetensors", "judgement.json")}
        if self.by_files:  # gradients have different names in files than in memory
            self.model.save_pretrained(files["gradients.safetensors"], state_dict=gradients)
        else:
            save_file({name: each.contiguous() for name, each in gradients.items()}, files["gradients.safetensors"])
        given = {name: each.numpy() for name, each in self.inputs.items()}
        np.savez(files["batch.npz"], input_ids=self.ids.numpy(), labels=labels.numpy(), **given)
        flags = ["--model", self.folder / "model", "--batch", files["batch.npz"], "--json", files["judgement.json"]]
        flags += ["--gradients", files["gradients.safetensors"], "--loss", loss.item(), "--computed-in", "fp32"]
        code = referee.main([*map(str, flags), *more])
        found: dict[str, object] = json.loads(files["judgement.json"].read_text())
        assert code == (0 if found["equal"] else 1)
        return found


def saved(model: PreTrainedModel, folder: Path, by_files: bool = False) -> Other:
    model.save_pretrained(folder / "model")
    return Other(model, folder, by_files)


@pytest.fixture
def llama(tmp_path: Path) -> Other:
    torch.manual_seed(1)
    return saved(LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)), tmp_path)


@pytest.fixture
def mixtral(tmp_path: Path) -> Other:
    torch.manual_seed(1)
    return saved(
        MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)), tmp_path, by_files=True
    )


def first(found: dict[str, object]) -> tuple[str, str]:
    """Return the name of the first wrong gradient in a judgement, and the cause of the error."""
    name = str(found["first"])
    return name, found["gradients"][name]["cause"]  # type: ignore[index]


def wrong(found: dict[str, object]) -> list[str]:
    rows: dict[str, dict[str, float]] = found["gradients"]  # type: ignore[assignment]
    return [name for name, row in rows.items() if row["difference"] > row["allowed"]]


def test_a_correct_program_passes(llama: Other, capsys: pytest.CaptureFixture[str]) -> None:
    found = llama.judged()
    assert found["equal"] and found["missing"] == []
    assert len(found["gradients"]) == 15  # type: ignore[arg-type]
    assert "15 of 15 gradients are equal" in capsys.readouterr().out


@pytest.mark.parametrize("names", ["transformers", "ours"])
def test_gradients_are_read_from_a_folder_of_dcp(tmp_path: Path, names: str) -> None:
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False))
    model.save_pretrained(tmp_path / "model")
    source = referee.Input.at(tmp_path / "model").open(referee.Options())
    theirs = {name: param.detach() for name, param in model.named_parameters()}
    ours = {name: source.read(name, torch.float32) for name in source.metas}
    dcp.save(theirs if names == "transformers" else ours, checkpoint_id=tmp_path / "gradients", no_dist=True)
    dump = referee.open_dump(tmp_path / "gradients", source)
    assert dump.dtype == torch.float32
    assert all(torch.equal(dump.read(name), ours[name].double()) for name in source.metas)


def test_correct_experts_pass(mixtral: Other) -> None:
    assert mixtral.judged()["equal"]


def test_gradients_averaged_over_an_additional_axis_are_named(llama: Other, capsys: pytest.CaptureFixture[str]) -> None:
    def halve(gradients: dict[str, Tensor]) -> None:
        for each in gradients.values():
            each /= 2

    assert first(llama.judged(halve)) == ("output_layer.weight", "is 1/2 times as large")
    assert "all gradients share it: is 1/2 times as large" in capsys.readouterr().out


def test_a_norm_gradient_without_the_tokens_of_another_rank_is_named(llama: Other) -> None:
    """The fault is a missing all-reduce of norm gradients under sequence parallelism: the first of two ranks has only
    its half of the sequence."""
    norm = llama.model.model.layers[1].post_attention_layernorm
    partial: list[Tensor] = []

    def of_first_half(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        x = args[0].detach()
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        output.register_hook(lambda grad: partial.append((grad * normed)[:, :8].sum((0, 1))))

    with norm.register_forward_hook(of_first_half):
        found = llama.judged(
            lambda gradients: gradients["model.layers.1.post_attention_layernorm.weight"].copy_(partial[-1])
        )
    name, cause = first(found)
    assert name == "decoder.layers.1.pre_mlp_layernorm.weight"
    assert cause == "is summed over places 0 to 7 of the sequence (block 0 of 2) alone"
    assert wrong(found) == [name]


@pytest.mark.parametrize(
    ("last", "norm", "ours", "features"),
    [
        ("self_attn.o_proj", "input_layernorm", "input_layernorm", (16, 31)),
        ("mlp.down_proj", "post_attention_layernorm", "pre_mlp_layernorm", (24, 47)),
    ],
    ids=["heads", "features of an MLP"],
)
def test_a_norm_gradient_without_the_features_of_another_rank_is_named(
    llama: Other, last: str, norm: str, ours: str, features: tuple[int, int]
) -> None:
    """The planted fault is a missing all-reduce of a norm gradient under tensor parallelism. The second of two ranks
    therefore has only the gradient from its own features."""
    layer = llama.model.model.layers[1]

    def of_second_half(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        first, end = features
        args[0].register_hook(lambda grad: grad * ((torch.arange(end + 1) >= first) & (torch.arange(end + 1) <= end)))

    def plant(gradients: dict[str, Tensor]) -> None:
        llama.model.zero_grad()
        labels = llama.ids.clone()
        labels[0, :6] = -100
        with layer.get_submodule(last).register_forward_pre_hook(of_second_half):
            llama.model(input_ids=llama.ids, labels=labels).loss.backward()
        gradients[f"model.layers.1.{norm}.weight"].copy_(layer.get_submodule(norm).weight.grad)

    name, cause = first(llama.judged(plant))
    linear = "self_attention.linear_proj" if norm == ours else "mlp.linear_fc2"
    assert name == f"decoder.layers.1.{ours}.weight"
    inputs = f"the inputs {features[0]} to {features[1]} of decoder.layers.1.{linear}.weight"
    assert cause == f"is summed over {inputs} (block 1 of 2) alone"


def test_an_expert_without_a_gradient_is_named(mixtral: Other) -> None:
    def forget(gradients: dict[str, Tensor]) -> None:
        for name in (name for name in gradients if "layers.1" in name and "down_proj" in name):
            gradients[name][3] = 0

    name, cause = first(mixtral.judged(forget))
    assert name.startswith("decoder.layers.1.mlp.experts") and cause == "block 3 of 4 of dim 0 is zero"


def test_a_shard_that_counts_twice_is_named(llama: Other) -> None:
    found = llama.judged(lambda gradients: gradients["model.layers.0.mlp.down_proj.weight"][:, 24:].mul_(2))
    assert first(found) == (
        "decoder.layers.0.mlp.linear_fc2.weight",
        "block 1 of 2 of dim 1 is 2 times as large",
    )


def test_swapped_gate_and_up_are_named(llama: Other) -> None:
    def swap(gradients: dict[str, Tensor]) -> None:
        names = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")]
        gradients[names[0]], gradients[names[1]] = (gradients[name] for name in reversed(names))

    name, cause = first(llama.judged(swap))
    assert name == "decoder.layers.0.mlp.linear_fc1.weight" and "transposed" not in cause
    assert cause == "the 2 blocks of dim 0 are in the order 1, 0"


def test_a_lost_micro_batch_is_named(llama: Other) -> None:
    """In the planted fault, the gradients of the second micro-batch overwrite those of the first micro-batch."""
    alone: dict[str, Tensor] = {}

    def plant(gradients: dict[str, Tensor]) -> None:
        llama.model.zero_grad()
        logits = llama.model(input_ids=llama.ids[1:, :-1]).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), llama.ids[1, 1:]).backward()
        alone.update({name: param.grad.clone() for name, param in llama.model.named_parameters()})
        gradients.update(alone)

    name, cause = first(llama.judged(plant))
    assert (
        name == "output_layer.weight"
        and cause == "is summed over sample 1 alone, and divided by the number of tokens in this part"
    )


def test_a_wrong_input_gradient_is_named_first(llama: Other, capsys: pytest.CaptureFixture[str]) -> None:
    attention = llama.model.model.layers[1].self_attn
    with attention.register_full_backward_pre_hook(lambda module, grads: (2 * grads[0], *grads[1:])):
        found = llama.judged()
    assert first(found) == ("decoder.layers.1.self_attention.linear_proj.weight", "is 2 times as large")
    assert len(wrong(found)) == 10
    assert "all gradients after it differ too" in capsys.readouterr().out


def test_a_wrong_forward_pass_shows_in_the_loss(llama: Other, capsys: pytest.CaptureFixture[str]) -> None:
    for layer in llama.model.model.layers:
        layer.self_attn.scaling *= 2
    assert not llama.judged()["equal"]
    assert "differs from" in capsys.readouterr().out


def test_missing_files_of_a_dump_are_named(llama: Other, capsys: pytest.CaptureFixture[str]) -> None:
    found = llama.judged(lambda gradients: gradients.pop("model.layers.0.self_attn.k_proj.weight"))
    assert found["equal"] and found["missing"] == ["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert "the dump has none of 1 parameters" in capsys.readouterr().out


STEP = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --mock-data --lr 1e-3 "
    "--global-batch-size 4 --micro-batch-size 1 --train-iters 3 --cpu --num-workers 0 --eval-iters 0 "
    "--attention-dropout 0 --hidden-dropout 0 --tp 2 --sequence-parallel --dump-step 2"
).split()


def two_steps(rank: int, world_size: int, config: RunConfig, forgets_norms: bool) -> None:
    with local_run(config, rank, world_size) as run:
        if forgets_norms:
            finalize_model_grads.all_reduce_flat_ = lambda *given: None  # type: ignore[assignment]
        for _ in range(2):
            train_step(run)


@pytest.mark.parametrize("forgets_norms", [False, True])
def test_a_dumped_step_is_judged(tmp_path: Path, forgets_norms: bool, capsys: pytest.CaptureFixture[str]) -> None:
    number = "1"
    config = resolve_legal(parse_args([*STEP, "--dump-step", number, "--dump-step-dir", str(tmp_path / "step")]), 2)
    run_world(2, two_steps, config, forgets_norms)
    code = referee.main(["--step", str(tmp_path / "step")])
    shown = capsys.readouterr().out
    assert code == int(forgets_norms), shown
    assert (tmp_path / "step/gradients-00001.safetensors").is_file(), "the referee's own run dumps nothing"
    if forgets_norms:
        assert "first in the backward pass: decoder.final_layernorm.bias is summed over places 0 to 7" in shown


def test_a_dump_replaces_no_other_files(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    flags = [*STEP, "--dump-step-dir", str(tmp_path)]
    with pytest.raises(ValueError, match="contains other files, which a dump would replace; name a new folder"):
        resolve_legal(parse_args(flags), 2)
    with pytest.raises(ValueError, match="needs a folder to write to; add --dump-step-dir FOLDER"):
        resolve_legal(parse_args(STEP), 2)


def test_a_step_with_dropout_is_refused(tmp_path: Path) -> None:
    flags = [*STEP, "--hidden-dropout", "0.1", "--dump-step-dir", str(tmp_path / "step")]
    run_world(2, two_steps, resolve_legal(parse_args(flags), 2), False)
    with pytest.raises(ValueError, match="was computed with dropout"):
        referee.main(["--step", str(tmp_path / "step")])
