"""Gradients through the buffers are autograd's, summed over ranks and divided once, however the batch is cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.config.parallel import DDPConfig, ModelParallelConfig
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads, global_token_count
from megatron.core.parallel_dims import ParallelDims
from megatron.core.parallel_state import ParallelState, build_parallel_state
from megatron.core.param_meta import ParamMeta
from tests.dist.toy import ToyStage, add_gradients, catalogue, local_part, noise
from tests.harness import run_world

VOCAB, HIDDEN, SAMPLES, LENGTH = 11, 5, 12, 4
FP64 = ModelParallelConfig(fp64=True)


class DirectWeightGrad(torch.autograd.Function):
    """A linear layer that adds its weight gradient into `main_grad` itself, as the real one does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        weight_grad = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        if not hasattr(weight, "main_grad"):
            return grad @ weight, weight_grad
        weight.main_grad.add_(weight_grad)
        if getattr(weight, "on_main_grad", None):
            weight.on_main_grad()
        return grad @ weight, None


class Model(nn.Module):
    """Embedding, two linear layers, norm weight, bias, and the embedding again as head: it gets two gradients."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {
            "embedding.word_embeddings.weight": (VOCAB, HIDDEN),
            "decoder.linear_fc1.weight": (23, HIDDEN),
            "decoder.linear_fc1.bias": (23,),
            "decoder.linear_fc2.weight": (HIDDEN, 23),
            "decoder.final_layernorm.weight": (HIDDEN,),
        }
        for i, (name, shape) in enumerate(shapes.items()):
            param = nn.Parameter(noise(shape, name))
            param.meta = ParamMeta(name, shape)
            self.register_parameter(f"p{i}", param)

    def forward(self, tokens, labels, mask):
        """Sum of masked token losses."""
        word, fc1, bias, fc2, norm = self.parameters()
        x = word[tokens]
        x = x + DirectWeightGrad.apply(torch.tanh(DirectWeightGrad.apply(x, fc1) + bias), fc2)
        logits = DirectWeightGrad.apply(x * norm, word)
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return (losses * mask.flatten()).sum()


def global_batch(mask_density=0.7):
    generator = torch.Generator().manual_seed(5)
    tokens, labels = (torch.randint(0, VOCAB, (SAMPLES, LENGTH), generator=generator) for _ in range(2))
    mask = (torch.rand(SAMPLES, LENGTH, generator=generator) < mask_density).double()
    mask[:3] = 0  # at dp 4 the first rank has nothing to learn
    return tokens, labels, mask


def expected_gradients(mask_density=0.7):
    model = Model()
    tokens, labels, mask = global_batch(mask_density)
    (model(tokens, labels, mask) / mask.sum().clamp(min=1)).backward()
    return {param.meta.name: param.grad for param in model.parameters()}


def backward_over(ddp, model, rank, world, micro_batch):
    """A step's backward over all micro-batches of this rank; returns its number of valid tokens."""
    per_rank = SAMPLES // world
    mine = [t[rank * per_rank : (rank + 1) * per_rank] for t in global_batch()]
    starts = range(0, per_rank, micro_batch)
    ddp.begin_step(len(starts))
    for start in starts:
        model(*(t[start : start + micro_batch] for t in mine)).backward()
    return mine[2].sum()


def gradients_equal_one_process(rank, world, dims, distributed, bucket_size, micro_batch, overlap):
    state = build_parallel_state(dims, rank)
    model = Model()
    values = [param.detach().clone() for param in model.parameters()]
    ddp = DistributedDataParallel(
        DDPConfig(bucket_size, overlap_grad_reduce=overlap), FP64, state, [model], distributed
    )
    for param, value in zip(model.parameters(), values, strict=True):
        assert torch.equal(param, value)
        assert any(param.data_ptr() - b.param_data.data_ptr() in range(b.param_data.nbytes) for b in ddp.buffers)
    expected = expected_gradients()
    for _ in range(3):  # the second and third time buckets start early
        started = []
        tokens = backward_over(ddp, model, rank, world, micro_batch)
        started.append(ddp._started)
        total = global_token_count(tokens, state)
        finalize_model_grads(ddp, total, state)
        assert total == global_batch()[2].sum()
        ddp.gather_grads_()
        for param in ddp.params:
            assert param.grad is None
            torch.testing.assert_close(param.main_grad, expected[param.meta.name], rtol=1e-12, atol=1e-14)
    assert started == [len(ddp.buckets) if overlap else 0]


@pytest.mark.parametrize("distributed", [True, False], ids=["zero1", "replicated"])
@pytest.mark.parametrize(
    ("dims", "bucket_size", "micro_batch"),
    [
        (ParallelDims(), None, 12),
        (ParallelDims(), 1, 5),
        (ParallelDims(dp=2), 100, 2),
        (ParallelDims(dp=3), 1, 3),
        (ParallelDims(dp=4), None, 1),
        (ParallelDims(dp=2, cp=2), 100, 3),
    ],
    ids=str,
)
def test_gradients_equal_one_process(dims, bucket_size, micro_batch, distributed):
    args = (dims, distributed, bucket_size, micro_batch, False)
    run_world(dims.world_size, gradients_equal_one_process, *args)


@pytest.mark.parametrize("distributed", [True, False], ids=["zero1", "replicated"])
def test_reductions_may_start_during_backward(distributed):
    run_world(3, gradients_equal_one_process, ParallelDims(dp=3), distributed, 1, 2, True)


def test_a_gradient_after_its_reduction_is_an_error():
    model = Model()
    ddp = DistributedDataParallel(DDPConfig(1, overlap_grad_reduce=True), FP64, ParallelState(), [model])
    for _ in range(2):
        backward_over(ddp, model, 0, 1, 12)
        if ddp._started:
            with pytest.raises(AssertionError, match="got a gradient after its bucket was reduced"):
                model(*global_batch()).backward()
        ddp.finish_grad_sync()


def all_masked(rank, world):
    state = build_parallel_state(ParallelDims(dp=world), rank)
    model = Model()
    ddp = DistributedDataParallel(DDPConfig(), FP64, state, [model])
    tokens, labels, mask = global_batch()
    model(tokens, labels, mask * 0).backward()
    finalize_model_grads(ddp, global_token_count((mask * 0).sum(), state), state)
    assert all(torch.equal(b.grad_data, torch.zeros_like(b.grad_data)) for b in ddp.buffers)


def test_a_batch_without_valid_tokens_has_gradient_zero():
    run_world(2, all_masked)


def partial_and_shared(rank, world, dims, distributed):
    """Sums over tp, over the two stages of a tied embedding and over data parallel; the last stage knows the tokens."""
    state = build_parallel_state(dims, rank)
    ddp = DistributedDataParallel(DDPConfig(64), FP64, state, [ToyStage(state)], distributed)
    ddp.zero_grad_buffer()
    add_gradients(ddp, state, step=0)
    finalize_model_grads(ddp, global_token_count(torch.tensor(5 if state.pp.last else 99), state), state)
    ddp.gather_grads_()
    seen = []
    for param in ddp.params:
        meta = param.meta
        members = dims.expt_dp if meta.expert else dims.dp * dims.cp
        total = sum(noise(meta.global_shape, meta.name, 0, member) for member in range(members))
        expected = local_part(total, meta, state) / (5 * dims.dp * dims.cp)
        torch.testing.assert_close(param.main_grad, expected, rtol=1e-12, atol=1e-14, msg=meta.name)
        seen.append(meta.name)
    return seen


@pytest.mark.parametrize("distributed", [True, False], ids=["zero1", "replicated"])
@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(tp=2, dp=2),
        ParallelDims(pp=2, dp=2),
        ParallelDims(pp=3),
        ParallelDims(tp=2, pp=2, dp=2),
        ParallelDims(tp=2, pp=2, dp=2, tp_pp_dp=True),
        ParallelDims(dp=4, ep=2),
    ],
    ids=str,
)
def test_partial_and_shared_gradients(dims, distributed):
    seen = run_world(dims.world_size, partial_and_shared, dims, distributed)
    assert {name for names in seen for name in names} == {meta.name for meta, _ in catalogue(dims.pp)}


def test_several_modules_share_buffers_and_parameters():
    first, second = Model(), nn.Module()
    for i, param in enumerate(list(first.parameters())[:2]):
        second.register_parameter(f"again{i}", param)
    frozen = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
    second.register_parameter("frozen", frozen)
    ddp = DistributedDataParallel(DDPConfig(), FP64, ParallelState(), [first, second])
    assert [id(p) for p in ddp.params] == [id(p) for p in first.parameters()]
    assert not hasattr(frozen, "main_grad")
    assert len(ddp.buffers) == 2


def test_main_gradients_of_16_bit_parameters_are_fp32():
    model = Model().bfloat16()
    for param, source in zip(model.parameters(), Model().parameters(), strict=True):
        param.meta = source.meta
    ddp = DistributedDataParallel(DDPConfig(), ModelParallelConfig(bf16=True), ParallelState(), [model])
    for param in ddp.params:
        assert (param.dtype, param.main_grad.dtype) == (torch.bfloat16, torch.float32)
    bias = ddp.params[2]
    for _ in range(300):  # in bf16 the sum would stand still at 256
        bias.sum().backward()
    assert torch.equal(bias.main_grad, torch.full((23,), 300.0))
