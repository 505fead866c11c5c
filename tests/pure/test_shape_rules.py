"""Fake tensors behave as the CPU's: rules of shapes are what the kernels do, and plans import no compiler."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megatron.core.batch import Batch
from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.planner.fake_tensors import FakeTensor, FakeTensors
from megatron.planner.shape_rules import META, RULES, rule_of
from tests.gpt_cases import GPT, LLAMA, STYLES, with_dropout
from tests.limits import HANG

ROOT = Path(__file__).parents[2]
MOE = replace(LLAMA, num_experts=4, moe_ffn_hidden_size=48, moe_aux_loss_coeff=0.1)
MODELS: dict[str, tuple[TransformerConfig, ModelParallelConfig]] = {
    "gpt": (GPT, ModelParallelConfig(bf16=True)),
    "gpt with dropout": (with_dropout(GPT), ModelParallelConfig(fp32=True)),
    "qwen3": (STYLES["qwen3"], ModelParallelConfig(bf16=True)),
    "recomputed": (replace(GPT, recompute_granularity="full"), ModelParallelConfig(fp64=True)),
    "window": (replace(LLAMA, window_size=5), ModelParallelConfig(bf16=True)),
    "experts": (MOE, ModelParallelConfig(bf16=True)),
    "experts by sigmoid": (
        replace(MOE, moe_router_score_function="sigmoid", moe_token_dispatcher_type="alltoall"),
        ModelParallelConfig(fp32=True),
    ),
    "fp8": (LLAMA, ModelParallelConfig(bf16=True, fp8_format="hybrid", fp8_recipe="delayed")),
    "fp8 by rows": (GPT, ModelParallelConfig(bf16=True, fp8_format="e4m3", fp8_recipe="rowwise")),
}


def facts(out: Any) -> list[Any]:
    """Shape, dtype and strides of each result; a dim of one element has no stride."""
    leaves = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
    strides = [[step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1] for x in leaves]
    return [(tuple(x.shape), x.dtype, step if x.numel() else None) for x, step in zip(leaves, strides, strict=True)]


class Compared(TorchDispatchMode):
    """Compares each operator that runs on values with its rule."""

    def __init__(self) -> None:
        super().__init__()
        self.met: set[Any] = set()
        self.different: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        on_meta, options = tree_map(on_meta_device, args), tree_map(on_meta_device, kwargs)
        out = func(*args, **kwargs)
        rule = rule_of(func)
        if rule is not func:
            self.met.add(func)
            found = rule(*on_meta, **options)
            if facts(found) != facts(out):
                self.different.append((func, facts(args), facts(found), facts(out)))
        return out


def on_meta_device(x: Any) -> Any:
    if isinstance(x, Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=META)
    return META if isinstance(x, torch.device) else x


def run(model: TransformerConfig, parallel: ModelParallelConfig) -> Compared:
    with Compared() as compared:
        built = GPTModel(model, parallel, initialize=False).train()
        for parameter in built.parameters():
            parameter.data.fill_(0.01)
        tokens = torch.arange(3 * model.seq_length).view(3, -1) % model.vocab_size
        batch = replace(Batch.of_tokens(tokens), aux_scale=torch.ones(()) if model.num_experts else None)
        if model.position_embedding_type == "learned_absolute":
            batch = replace(batch, position_ids=torch.zeros_like(tokens))
        built(None, batch).backward()
    return compared


def test_rules_are_what_the_kernels_do() -> None:
    met = set()
    for name, (model, parallel) in MODELS.items():
        compared = run(model, parallel)
        assert compared.different == [], name
        met |= compared.met
    assert set(RULES) - met <= {torch.ops.aten._grouped_mm.default}  # on CPU a loop


def test_layout_of_element_wise_results() -> None:
    """Strides in the order of the operands, dtypes promoted, dims broadcast."""
    x, y = torch.ones(3, 1, 5, dtype=torch.bfloat16), torch.ones(4, 3, dtype=torch.float32).t()
    z, dense = torch.ones(2, 4, 3).permute(1, 2, 0), torch.ones(6, 4).t()
    number = torch.tensor(2.0, dtype=torch.float64)
    with Compared() as compared:
        for a, b in ((x, y[..., None]), (z, y[..., None].transpose(0, 1)), (dense, 2), (dense, dense > 1), (x, number)):
            assert facts(a * b) and facts(torch.where(a > 1, a, b)) and facts((a + b).exp())
        assert facts(torch.empty_like(z)) and facts(x.expand(3, 4, 5).clone())
        assert facts(torch.add(dense.t(), 1, out=torch.empty(0))) and facts(dense.mul_(2))
    assert compared.different == []
    assert len(compared.met) >= 10


def test_fake_tensors() -> None:
    with FakeTensors():
        x = torch.ones(4, 6)
        assert (x.device.type, x.is_cpu, x.untyped_storage().nbytes()) == ("cpu", True, 96)
        assert x.t().untyped_storage()._cdata == x.untyped_storage()._cdata
        assert x.sum().item() == 0.0 and int(torch.tensor([7])[0]) == 0
        assert x.unsqueeze_(0).shape == (1, 4, 6) and (x * 2).shape == (1, 4, 6)
        weight = nn.Parameter(torch.empty(6, 3))
        (x @ weight).sum().backward()
        assert isinstance(weight.grad, FakeTensor) and weight.grad.shape == weight.shape
        weight.data = torch.empty(2, 2, dtype=torch.bfloat16)
        assert (weight + 1).shape == (2, 2) and (weight + 1).dtype == torch.bfloat16
        with pytest.raises(RuntimeError):
            x.numpy()


def test_operators_without_a_rule() -> None:
    """torch's rule, else a run on zeros; none where the shape of the result depends on values."""
    library = torch.library.Library("shape_rules_test", "DEF")
    library.define("rows(Tensor x) -> Tensor")
    library.impl("rows", lambda x: x[:2].clone(), "CPU")
    rows = torch.ops.shape_rules_test.rows
    with FakeTensors():
        x = torch.ones(4, 6)
        assert x.cumsum(0).shape == (4, 6)
        assert isinstance(rows(x), FakeTensor) and rows(x).shape == (2, 6)
        with pytest.raises(NotImplementedError, match="depends on values"):
            x.nonzero()


@pytest.mark.parametrize(
    "flags",
    [
        "--tp 2 --sequence-parallel --recompute-granularity selective --bf16",
        "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --num-experts 8 "
        "--recompute-granularity full",
    ],
)
def test_plans_import_no_compiler(flags: str) -> None:
    argv = (
        "--dry-run --world-size 8 --num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 128 --pp 2 "
        f"--global-batch-size 16 --mock-data --vocab-size 1000 --lr 1e-3 --train-iters 10 {flags}"
    )
    code = (
        "import pretrain_gpt, sys\n"
        f"try: pretrain_gpt.main({argv.split()!r})\n"
        "except SystemExit as end: assert not end.code\n"
        "print('imported', 'torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=HANG
    )
    assert done.stdout.splitlines()[-1] == "imported True False"
