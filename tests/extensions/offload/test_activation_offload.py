"""Offloading saved activations to host memory gives bit-identical results and uses bounded memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megatron.core.batch import Batch
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.pass_context import PassContext
from megatron.extensions.memory.offload.saved_activations import ActivationOffload, HostPool
from megatron.testing.snapshot import differences
from megatron.training.config.arguments import parse_args, with_flags
from megatron.training.config.validation import resolve, validate
from tests.extensions import needs
from tests.extensions.offload.test_cpu_offload import LateQueue
from tests.gpt_cases import LLAMA, with_dropout
from tests.harness import train_in_world
from tests.rules import BASE, problems
from tests.tiny import TINY

COMMON = f"{TINY} --num-layers 4 --seq-length 32 --make-vocab-size-divisible-by 4 --global-batch-size 8 --train-iters 2"
SELECTIVE = "--recompute-granularity selective --recompute-modules"


RUNS = [
    (1, f"--bf16 --pp 2 --pipeline-schedule zb-v {SELECTIVE} layernorm mlp_act core_attn"),
    needs("fp8", 3, "--bf16 --tp 2 --sequence-parallel --fp8-format hybrid --fp8-recipe delayed --kv-channels 16"),
]


@pytest.mark.parametrize(("layers", "flags"), RUNS)
def test_offloading_changes_no_bit(layers: int, flags: str) -> None:
    """The runs train in a 16-bit format. The parity matrix (tests/parity) covers other layouts."""
    plain = f"{COMMON} {flags}".split()
    offload = f"--cpu-offloading --cpu-offloading-num-layers {layers} --min-offloaded-tensor-size 1".split()
    found = list(differences(train_in_world(2, plain), train_in_world(2, [*plain, *offload])))
    assert len(found) > 20 and {error for _, error in found} == {0.0}


def model_with(offload: ActivationOffload | None) -> GPTModel:
    config = replace(with_dropout(LLAMA), num_layers=3)
    return GPTModel(config, ModelParallelConfig(fp32=True), passes=PassContext(offload=offload)).train()


def batch_of(model: GPTModel, samples: int = 2, first: int = 0) -> Batch:
    tokens = (torch.arange(samples * model.config.seq_length) + first) % model.config.vocab_size
    return Batch.of_tokens(tokens.view(samples, -1))


def gradients(model: GPTModel) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def offload_with_late_copies() -> ActivationOffload:
    offload = ActivationOffload(2, 1, "cpu")
    offload.to_host = offload.to_device = LateQueue(offload.device)
    return offload


def test_copies_are_waited_for_and_buffers_are_not_overwritten() -> None:
    """The backward passes of three micro-batches run in a different order than the forward passes, and all copies
    complete as late as possible."""
    found = []
    for offload in (None, offload_with_late_copies()):
        model = model_with(offload)
        first, second = model(None, batch_of(model)), model(None, batch_of(model, first=5))
        first.backward()
        third = model(None, batch_of(model, first=9))
        third.backward()
        second.backward()
        found.append(gradients(model))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_layers_activations_are_fetched_while_the_next_layer_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    offload, log = offload_with_late_copies(), list[str]()
    model, fetch = model_with(offload), offload.fetch
    monkeypatch.setattr(offload, "fetch", lambda *args: log.append("fetch") or fetch(*args))
    for number, layer in enumerate(model.decoder.layers):
        layer.register_full_backward_pre_hook(lambda *_, number=number: log.append(f"begin {number}"))
        layer.register_full_backward_hook(lambda *_, number=number: log.append(f"end {number}"))
    model(None, batch_of(model)).backward()
    assert len(log) > 10
    fetches = [entry for entry in log if entry == "fetch"]
    order = [entry for entry, after in zip(log, [*log[1:], ""], strict=True) if entry != after]
    # Layer 1 is fetched when layer 2 begins, and layer 0 when layer 1 begins. Nothing is fetched later.
    assert [entry for entry in order if entry != "fetch"] == [f"{w} {n}" for n in (2, 1, 0) for w in ("begin", "end")]
    assert order[-2:] == ["begin 0", "end 0"] and order.count("fetch") == 2
    assert order.index("fetch") < order.index("end 2") and len(fetches) % 2 == 0


def test_each_tensor_is_offloaded_once_or_not_at_all() -> None:
    offload = ActivationOffload(1, 8, "cpu")
    weight, table = nn.Parameter(torch.ones(4, 8)), torch.rand(4, 8)
    given = torch.ones(4, 8, requires_grad=True)
    through = offload.begin(given, {"rotary": (table,)})
    with through.part(True, [weight]):
        # autograd saves an input, a parameter and a shared tensor, none of which is offloaded
        made = given * weight * table
        assert offload.sent == 0
        few = made[0, :4].exp() * made[0, :4]  # below 8 elements
        assert offload.sent == 0
        # autograd saves two views of `made`, a product and a copy
        out = made[:2] * made[2:] * made[1:3].t().contiguous().t()
    assert offload.sent == made.nbytes + 2 * out.nbytes
    through.watch(out)
    through.end()
    expected = torch.autograd.grad((out.sum() + few.sum()), given, retain_graph=True)[0]
    plain = given * weight * table
    few, out = plain[0, :4].exp() * plain[0, :4], plain[:2] * plain[2:] * plain[1:3].t().contiguous().t()
    assert torch.equal(torch.autograd.grad(out.sum() + few.sum(), given)[0], expected)


def test_buffers_are_reused_and_freed_with_graphs_that_have_no_backward() -> None:
    offload = ActivationOffload(3, 1, "cpu")
    model = model_with(offload)
    model(None, batch_of(model)).backward()
    after_one = offload.pool.nbytes
    for _ in range(2):
        model(None, batch_of(model))  # discard the loss without a backward pass
        model(None, batch_of(model)).backward()
    assert offload.pool.nbytes == after_one
    pending = model(None, batch_of(model))
    model(None, batch_of(model)).backward()
    assert offload.pool.nbytes == 2 * after_one
    del pending


def test_nothing_is_offloaded_without_gradients() -> None:
    offload = ActivationOffload(3, 1, "cpu")
    model = model_with(offload)
    with torch.no_grad():
        model(None, batch_of(model))
    model.eval()(None, batch_of(model))
    assert offload.sent == 0


def test_buffer_sizes_are_powers_of_two() -> None:
    pool = HostPool(pinned=False)
    buffers = [pool.take(size) for size in (1, 3, 4, 5)]
    assert [len(buffer.memory) for buffer in buffers] == [1, 4, 4, 8] and pool.nbytes == 17
    pool.give_back(buffers[1])
    assert pool.take(4) is buffers[1] and pool.take(2) is not buffers[2]


def test_uneven_stages_are_validated_when_the_vocabulary_is_known() -> None:
    flags = BASE.replace("--mock-data", "--data-path corpus --tokenizer-type ByteTokenizer")
    flags += " --num-layers 5 --pp 2 --cpu-offloading --cpu-offloading-num-layers 3"
    config = parse_args(flags.split())
    assert config.model.vocab_size is None
    for vocab_size in (None, 256):
        assert not [each for each in validate(resolve(config, 2, vocab_size), 2) if "offloading" in each.flag]
    many = resolve(with_flags(config, ["--cpu-offloading-num-layers", "5"]), 2, 256)
    assert [each.flag for each in validate(many, 2) if "offloading" in each.flag] == ["--cpu-offloading-num-layers"]


def test_a_wrong_layout_is_reported_by_its_own_rule() -> None:
    assert not any("offloading" in problem for problem in problems("--cpu-offloading --pp 0", 1))
