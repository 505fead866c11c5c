"""Parity tests of fp8 training. Each layout is compared with one process. All pipeline schedules are compared with each
other. A resumed run is compared with an uninterrupted run.

All layouts cast the operands of a layer in the same way (`test_layers.py`), but activations between layers are bf16.
Tensor parallelism adds rounded partial sums. As a result, one value in a few hundred is rounded to a different fp8
number, which differs by a relative 2^-4. The error bounds therefore allow for fp8 rounding. The bounds are tight for
layouts that do not split any sum over ranks.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.collectives import Pending
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.parallel_state import Axis
from megatron.testing.local_world import run_world
from megatron.testing.snapshot import first_difference
from megatron.training.run import TrainingRun
from megatron.training.step_guard import BadStepError
from megatron.training.tasks import save
from megatron.training.train_step import train_step
from tests.extensions import needs
from tests.harness import Snapshot, running, train_in_world

BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 100 "
    "--make-vocab-size-divisible-by 8 --lr 1e-2 --mock-data --global-batch-size 8 --train-iters 4 --eval-iters 0 "
    "--num-workers 0 --bf16 --cpu --fp8-format hybrid --fp8-amax-history-len 2 --fp8-amax-compute-algo max"
)
RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise")
WHOLE_TILES = "--kv-channels 128 --ffn-hidden-size 256"
"""Flags for blockwise runs that make the widths multiples of a tile, so that no tile spans two ranks."""


def flags_of(recipe: str, more: str = "") -> list[str]:
    delayed = "" if recipe == "delayed" else "--fp8-amax-history-len 1 --fp8-amax-compute-algo most_recent"
    tiles = WHOLE_TILES if recipe == "blockwise" else ""
    return f"{BASE} --fp8-recipe {recipe} {delayed} {tiles} {more}".split()


@lru_cache
def train(recipe: str, world_size: int, layout: str) -> Snapshot:
    return train_in_world(world_size, flags_of(recipe, layout), steps=2)


def distance(a: Snapshot, b: Snapshot, kind: str) -> float:
    """Return the relative distance between two snapshots. All tensors of the given kind from the first step are
    concatenated."""
    keys = [key for key in a.tensors if key.startswith(f"step 1 {kind}")]
    assert keys and a.tensors.keys() == b.tensors.keys()
    pairs = [(a[key].double().flatten(), b[key].double().flatten()) for key in keys]
    one, two = (torch.cat(side) for side in zip(*pairs, strict=True))
    return ((one - two).norm() / two.norm()).item()


SP = "--tp 2 --sequence-parallel"
CHUNKS = "--loss-chunk-tokens 7"
LATENT = (
    "--position-embedding-type rope --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 16 --v-head-dim 16 --qk-layernorm --micro-batch-size 2"
)
DELTA_NET = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-key-head-dim 14 --linear-value-head-dim 8 --micro-batch-size 2"
)
EXPERTS = "--disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32"
BIASED_EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 32 --quick-geglu --glu-linear-offset 1"
WIDE_EXPERTS = "--disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 256 --swiglu"
IN_TURNS = "--moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm"
# Without tensor parallelism, results differ only in the bf16 rounding of the sum over a token's experts.
PART = [
    *((recipe, 2, "", layout, 1e-6) for recipe in RECIPES for layout in ("--pp 2 --pipeline-schedule zb-h1", "--dp 2")),
    *((recipe, 2, "", SP, 0.05) for recipe in RECIPES),
    ("delayed", 2, "", "--tp 2", 0.05),
    ("delayed", 1, "", CHUNKS, 5e-3),
    ("tensorwise", 2, "--mtp-num-layers 1 --untie-embeddings-and-output-weights", f"{SP} {CHUNKS}", 0.05),
    ("delayed", 2, "", "--cp 2 --micro-batch-size 2", 0.05),
    ("blockwise", 2, "--seq-length 128 --micro-batch-size 4", "--cp 2", 0.05),
    needs("latent_attention", "delayed", 2, LATENT, SP, 0.05),
    needs("latent_attention", "rowwise", 2, LATENT, SP, 0.05),
    needs("linear_attention", "rowwise", 2, DELTA_NET, SP, 0.05),
    ("rowwise", 2, EXPERTS, "--ep 2 --moe-token-dispatcher-type alltoall", 1e-3),
    ("blockwise", 2, WIDE_EXPERTS, "--ep 2", 1e-3),
    ("rowwise", 2, BIASED_EXPERTS, "--ep 2", 1e-3),
]
WHOLE = [
    *PART,
    ("delayed", 2, EXPERTS, "--ep 2", 1e-3),
    ("tensorwise", 2, WIDE_EXPERTS, f"{SP} --etp 2", 0.05),
    needs("overlap", "delayed", 4, EXPERTS, f"--pp 2 --ep 2 --pipeline-schedule zb-h2 {IN_TURNS}", 1e-3),
    ("blockwise", 4, WIDE_EXPERTS, f"{SP} --etp 2 --ep 2", 0.05),
]
"""Each case consists of the recipe, the number of ranks, the flags of both runs, the layout flags of the parallel run,
and the error bound for gradients."""


@pytest.mark.grid(("recipe", "ranks", "model", "layout", "bound"), PART, WHOLE)
def test_layouts_agree_with_one_process(recipe: str, ranks: int, model: str, layout: str, bound: float) -> None:
    one, found = train(recipe, 1, model), train(recipe, ranks, f"{model} {layout}".strip())
    assert not found.replica_errors
    assert distance(found, one, "loss") < min(bound, 1e-4)
    assert distance(found, one, "gradient") < bound
    if recipe == "delayed" and "experts" not in model:
        assert distance(found, one, "state") < bound


RECOMPUTED = [
    ("delayed", "full --recompute-method uniform"),
    ("rowwise", "selective --recompute-modules core_attn layernorm mlp_act"),
]


@pytest.mark.parametrize(("recipe", "how"), RECOMPUTED)
def test_recomputation_changes_no_bit(recipe: str, how: str) -> None:
    assert first_difference(train(recipe, 1, f"--recompute-granularity {how}"), train(recipe, 1, ""), 0.0) is None


def states(run: TrainingRun) -> dict[str, Tensor]:
    """Return all parameters of this rank's pipeline stages, including amax histories, keyed by name."""
    run.optimizer.finish_param_sync()
    found = {}
    for model in run.stages.values():
        found |= {name: param.detach().clone() for name, (param, _) in model.named_metas().items()}
    return found


def interrupted(rank: int, world_size: int, folder: Path, layout: str) -> None:
    """Train four steps with a checkpoint after the second step, then repeat the last two steps from the checkpoint."""
    flags = flags_of("delayed", f"{layout} --save {folder} --load {folder} --no-async-save")
    with ExitStack() as resources:
        run = resources.enter_context(running(flags, rank, world_size))
        for step in range(4):
            if step == 2:
                save(run)
                saved = states(run)
            train_step(run)
        run.saver.finish()
        again = resources.enter_context(running(flags, rank, world_size))
        assert again.progress.iteration == 2
        loaded = states(again)
        for _ in range(2):
            train_step(again)
        for one, two in ((saved, loaded), (states(run), states(again))):
            assert one.keys() == two.keys()
            assert [name for name, value in one.items() if not torch.equal(value, two[name])] == []
        histories = [name for name in saved if name.endswith("amax_history")]
        assert histories and all((saved[name] > 0).all() for name in histories)


def loaded_histories(rank: int, world_size: int, flags: list[str]) -> dict[str, Tensor]:
    with running(flags, rank, world_size) as run:
        assert run.progress.iteration == 2
        train_step(run)
        return {name: value for name, value in states(run).items() if name.endswith("amax_history")}


def test_resuming_is_bitwise_and_histories_fit_any_layout(tmp_path: Path) -> None:
    run_world(2, interrupted, tmp_path, "--tp 2")
    load = f"--load {tmp_path}"
    whole = run_world(1, loaded_histories, flags_of("delayed", load))[0]
    stages = run_world(2, loaded_histories, flags_of("delayed", f"{load} --pp 2"))
    assert {name for found in stages for name in found} == whole.keys() and len(whole) == 8
    for found in stages:
        for name, history in found.items():
            assert torch.equal(history, whole[name]) and (history > 0).all()
    # An amax history that exists only in the checkpoint or only in the run is ignored. If the history length differs
    # from the length in the checkpoint, the history starts from zeros.
    longer = run_world(1, loaded_histories, flags_of("delayed", f"{load} --fp8-amax-history-len 3"))[0]
    assert all((history[:, 0] > 0).all() and not history[:, 1:].any() for history in longer.values())
    assert run_world(1, loaded_histories, flags_of("rowwise", load)) == [{}]


def broken(rank: int, world_size: int, recipe: str) -> bool:
    """Return True if a non-finite weight was detected and the values recorded in that step were discarded."""
    with running(flags_of(recipe), rank, world_size) as run:
        train_step(run)
        before = states(run)
        with torch.no_grad():
            run.stages[0].decoder.layers[1].mlp.linear_fc1.weight[0, 0] = torch.inf  # type: ignore[union-attr, index]
        train_step(run)
        with pytest.raises(BadStepError, match="iteration 2 is not finite"):
            train_step(run)
        after = states(run)
        return all(torch.equal(value, after[name]) for name, value in before.items() if name.endswith("history"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_non_finite_values_are_detected(recipe: str) -> None:
    assert run_world(1, broken, recipe) == [True]


def test_experts_have_no_amax_histories() -> None:
    found = train("delayed", 1, EXPERTS)
    histories = {key.split("layers.1.")[1] for key in found.tensors if "layers.1." in key and "history" in key}
    linears = ("self_attention.linear_qkv", "self_attention.linear_proj")
    shared = ("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2")
    assert histories == {f"{name}.amax_history" for name in (*linears, *shared)}


GATHER = "--fp8-param-gather"


def third_step(recipe: str, world_size: int, layout: str) -> Snapshot:
    """Return a snapshot of the third step. The weights of the first two steps are not read, because reading gathers
    them in bf16. The snapshot excludes the gradient norm, because layouts sum it in different orders. Gradients are not
    clipped."""
    found = train_in_world(world_size, flags_of(recipe, f"{layout} --clip-grad 0"), 1, unseen=2)
    assert not found.replica_errors
    kept = {key: value for key, value in found.tensors.items() if not key.endswith("grad_norm")}
    return replace(found, tensors=kept)


GATHERED = [
    ("tensorwise", 2, "--dp 2"),
    ("delayed", 2, "--dp 2"),
    ("blockwise", 2, "--dp 2"),
    ("delayed", 2, "--dp 2 --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 4000"),
    ("tensorwise", 4, "--dp 2 --tp 2 --sequence-parallel"),
    ("delayed", 4, "--dp 2 --pp 2 --optimizer muon"),
    ("blockwise", 3, f"--dp 3 --global-batch-size 9 {WIDE_EXPERTS}"),
]


@pytest.mark.grid("case", GATHERED[1:5:2], GATHERED)
def test_weights_gathered_in_fp8_change_no_bit(case: tuple[str, int, str]) -> None:
    recipe, world_size, layout = case
    plain, found = (third_step(recipe, world_size, f"{layout} {how}") for how in ("", GATHER))
    assert first_difference(found, plain, 0.0) is None


PER_TENSOR = [needs("overlap", "delayed"), needs("overlap", "tensorwise")]


@pytest.mark.grid("recipe", PER_TENSOR[:1], PER_TENSOR)
def test_overlapped_parts_are_cast_like_the_whole_tensor(recipe: str) -> None:
    """The results are bit-identical, because the sum of the values of two ranks is the same in either order."""
    plain, found = (third_step(recipe, 2, f"{SP} {how}") for how in ("", "--tp-comm-overlap"))
    assert first_difference(found, plain, 0.0) is None


def gathered_bytes(rank: int, world_size: int, flags: list[str]) -> int:
    """Return the total output size in bytes of the parameter all-gathers on this rank in one step."""
    found, start = [], param_and_grad_buffer.start_all_gather

    def counted(x: Tensor, axis: Axis, out: Tensor | None = None) -> Pending:
        assert out is not None
        found.append(out.nbytes)
        return start(x, axis, out)

    with running(flags, rank, world_size) as run, pytest.MonkeyPatch.context() as patched:
        patched.setattr(param_and_grad_buffer, "start_all_gather", counted)
        train_step(run)
        total = sum(found)
        run.optimizer.finish_param_sync()
        run.optimizer.finish_param_sync()
        return total


def test_gathers_in_fp8_send_half_the_bytes() -> None:
    linears = 2 * (3 * 32 * 32 + 32 * 32 + 2 * 128 * 32)
    plain, found = (run_world(2, gathered_bytes, flags_of("tensorwise", f"--dp 2 {how}"))[0] for how in ("", GATHER))
    assert plain - found == pytest.approx(linears, abs=200), "one byte for each linear weight, plus padding"
    flags = f"--dp 2 --first-last-layers-bf16 --num-layers-at-end-in-bf16 0 {GATHER}"
    mixed = run_world(2, gathered_bytes, flags_of("tensorwise", flags))[0]
    assert mixed == plain
