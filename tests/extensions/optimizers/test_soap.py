"""SOAP makes the same updates as its authors' program under any layout. Its states have the planned size and can be
resharded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.optimizer.planned_states import matrix_size
from megatron.core.optimizer.transforms import ParameterUpdate, Place
from megatron.core.parallel_dims import ParallelDims
from megatron.core.parallel_state import build_parallel_state
from megatron.core.param_meta import ParamMeta
from megatron.extensions.optim.optimizers.soap import Soap, eigenbasis, followed, independent
from tests.dist.test_chains import LAYOUTS, OfMatrices, load_and_compare, skipped_step, train_and_save
from tests.dist.toy import DECAY, LR, Oracle, build, optimizer_config, run_step
from tests.forked import run_program
from tests.harness import run_world

FLAGS = {"optimizer": "soap", "adam_beta1": 0.8, "adam_beta2": 0.9, "soap_precondition_frequency": 2}


class TheirSoap(torch.optim.Optimizer):
    """Reimplementation of github.com/nikhilvyas/SOAP for matrices, with the default options of that program. `basis`
    corresponds to get_orthogonal_matrix, and `refreshed` to get_orthogonal_matrix_QR. If `repaired` is True, directions
    in which no gradient has occurred keep their basis vectors."""

    def __init__(self, groups, shampoo_beta=0.9, max_dim=10_000, eps=1e-8, repaired=False):
        super().__init__(groups, {"lr": LR, "weight_decay": DECAY})
        self.frequency, self.betas, self.shampoo_beta = 2, (0.8, 0.9), shampoo_beta
        self.max_dim, self.eps, self.repaired = max_dim, eps, repaired

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                for index in range(param[..., 0, 0].numel()):  # one parameter may contain several experts
                    matrix, grad = (x.view(-1, *x.shape[-2:])[index] for x in (param, param.grad))
                    self.one(matrix, grad, self.state[param].setdefault(index, {}), group)

    def one(self, p: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        if not state:
            state |= {"step": 0, "avg": torch.zeros_like(p), "sq": torch.zeros_like(p)}
            state["GG"] = [grad.new_zeros(n, n) if n <= self.max_dim else None for n in p.shape]
            self.update_factors(grad, state)
            state["Q"] = [m if m is None else self.basis(m) for m in state["GG"]]
            return
        state["step"] += 1
        (beta1, beta2), t = self.betas, state["step"]
        projected = project(grad, state["Q"])
        state["avg"] = beta1 * state["avg"] + (1 - beta1) * projected
        state["sq"] = beta2 * state["sq"] + (1 - beta2) * projected**2
        size = group["lr"] * (1 - beta2**t) ** 0.5 / (1 - beta1**t)
        p -= size * project_back(state["avg"] / (state["sq"].sqrt() + self.eps), state["Q"])
        p -= group["lr"] * group["weight_decay"] * p
        average = project_back(state["avg"], state["Q"])
        self.update_factors(grad, state)
        if t % self.frequency == 0:
            self.refreshed(state)
        state["avg"] = project(average, state["Q"])

    def update_factors(self, grad: Tensor, state: dict) -> None:
        for factor, square in zip(state["GG"], (grad @ grad.T, grad.T @ grad), strict=True):
            if factor is not None:
                factor.lerp_(square, 1 - self.shampoo_beta)

    def basis(self, factor: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(factor + 1e-30 * torch.eye(len(factor), dtype=factor.dtype))
        values, vectors = values.flip(0), vectors.flip(1)
        return self.repair(vectors, values, torch.eye(len(factor), dtype=factor.dtype))

    def refreshed(self, state: dict) -> None:
        for dim, (factor, old) in enumerate(zip(state["GG"], state["Q"], strict=True)):
            if factor is not None:
                order = torch.argsort(torch.diag(old.T @ factor @ old), descending=True)
                found, sizes = torch.linalg.qr(factor @ old[:, order])
                # Move the directions of size 0 to the end. All directions that the QR decomposition computes after such
                # a direction depend on rounding errors.
                if self.repaired:
                    zero = sizes.diag().abs() < 1e-13 * sizes.diag().abs().max()
                    order = torch.cat((order[~zero], order[zero]))
                    found, sizes = torch.linalg.qr(factor @ old[:, order])
                state["sq"] = state["sq"].index_select(dim, order)
                state["Q"][dim] = self.repair(found, sizes.diag().abs(), old[:, order])

    def repair(self, vectors: Tensor, sizes: Tensor, others: Tensor) -> Tensor:
        """Return a copy of a basis without zero vectors. Each zero vector is replaced by a vector of `others` after
        Gram-Schmidt orthogonalization.

        Vectors of `others` that would lose most of their length are skipped.
        """
        vectors = vectors.clone()
        zero = sizes < 1e-13 * sizes.max()
        if self.repaired and zero.any():
            places, limit = zero.nonzero().flatten().tolist(), 0.5 * len(sizes) ** -0.5
            for vector in torch.cat((others[:, zero], others[:, ~zero]), dim=1).T:
                before = vectors[:, : places[0]]
                for _ in range(2):
                    vector = vector - before @ (before.T @ vector)
                if vector.norm() > limit:
                    vectors[:, places.pop(0)] = vector / vector.norm()
                if not places:
                    break
        return vectors


def project(x: Tensor, bases: list) -> Tensor:
    left, right = bases
    x = x if left is None else left.T @ x
    return x if right is None else x @ right


def project_back(x: Tensor, bases: list) -> Tensor:
    return project(x, [None if q is None else q.T for q in bases])


def drawn(rows: int, columns: int, rank: int) -> list[Tensor]:
    """Return random gradients for 7 steps. All gradients lie in the same subspace of dimension `rank`."""
    generator = torch.Generator().manual_seed(rows * columns + rank)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    left, right = draw(rows, rank), draw(rank, columns)
    return [left @ draw(rank, rank) @ right for _ in range(7)]


@pytest.mark.parametrize(
    ("shape", "max_dim"), [((5, 5), 10_000), ((9, 4), 10_000), ((3, 8), 10_000), ((9, 4), 8), ((9, 4), 2)], ids=str
)
def test_updates_match_the_authors_program(shape, max_dim):
    """If all gradients are zero along a direction, the authors' program derives the basis vector for this direction
    from rounding errors. The gradients in this test therefore all span the same directions."""
    meta = ParamMeta("weight", shape, role="hidden")
    flags = FLAGS | {"soap_shampoo_beta": 0.7, "soap_max_precondition_dim": max_dim, "adam_eps": 1e-4}
    link = Soap(optimizer_config(**flags))
    states = {state.name: torch.zeros(state.shape, dtype=torch.float64) for state in link.states(meta)}
    grads = drawn(*shape, min(shape))
    start = torch.ones(shape, dtype=torch.float64)
    theirs, ours = torch.nn.Parameter(start.clone()), start.clone().view(-1)
    reference = TheirSoap([theirs], shampoo_beta=0.7, max_dim=max_dim, eps=1e-4)
    place = Place(((0, 0), shape), (0, start.numel()), True, {})
    for step, grad in enumerate(grads, 1):
        theirs.grad = grad
        reference.step()
        x = ParameterUpdate(meta, ours, grad.view(-1), {}, place, (LR, DECAY, torch.tensor(float(step))))
        requests = link.update(x)
        (request,) = next(requests)
        with pytest.raises(StopIteration):
            requests.send([request.function(grad, states).view(-1)])
        ours = ours + x.update
        torch.testing.assert_close(ours.view(shape), theirs.detach(), rtol=1e-10, atol=1e-10)
    assert (theirs - start).abs().mean() > LR / 2


def oracle_of(state) -> Oracle:
    """Return the reference optimizer, which applies SOAP to hidden matrices and AdamW to all other parameters."""
    oracle = Oracle(state, lambda groups: None)
    oracle.optimizer = Both(oracle)
    return oracle


class Both(torch.optim.Optimizer):
    def __init__(self, oracle: Oracle) -> None:
        metas, params = oracle.metas, oracle.params
        whole = {name for name, meta in metas.items() if meta.matrix and meta.role != "embedding"}
        self.adam = torch.optim.AdamW(
            [{"params": [p for n, p in params.items() if n not in whole and metas[n].matrix is decays]}
             for decays in (True, False)],
            lr=LR, betas=(0.8, 0.9),
        )  # fmt: skip
        by_param = {id(params[name]): metas[name] for name in whole}
        hidden = [{"params": [params[name] for name in sorted(whole)]}]
        self.soap = OfMatrices(hidden, by_param, lambda own: TheirSoap(own, repaired=True))
        super().__init__([{"params": list(params.values())}, {"params": [torch.nn.Parameter()]}], {})

    def step(self) -> None:  # type: ignore[override]
        self.soap.param_groups[0]["weight_decay"] = self.adam.param_groups[0]["weight_decay"] = DECAY
        self.adam.param_groups[1]["weight_decay"] = 0.0
        self.soap.step()
        self.adam.step()


def compare_with_one_process(rank, world, dims, distributed):
    state = build_parallel_state(dims, rank)
    ddp, optimizer = build(state, distributed, clip_grad=0.5, **FLAGS)
    oracle = oracle_of(state)
    for step in range(6):
        _, tokens = run_step(ddp, optimizer, state, step)
        oracle.step(step, tokens, 0.5, DECAY)
        for param in ddp.params:
            name = param.meta.name
            torch.testing.assert_close(param.detach(), oracle.local(name), rtol=1e-9, atol=1e-9, msg=name)
    chains = [chain for chain in optimizer.chains if chain.nbytes]
    for chain in chains:
        assert chain.nbytes == chain.plan.bytes_by_place(8)[chain.plan.ranks.index(rank)]
    return bool(chains)


@pytest.mark.parametrize("distributed", [True, False], ids=["zero1", "replicated"])
@pytest.mark.parametrize("dims", LAYOUTS, ids=str)
def test_updates_match_one_process(dims, distributed):
    """The cases include unsharded matrices and experts. Each optimizer state is stored on exactly one rank and has the
    planned size in bytes."""
    assert any(run_world(dims.world_size, compare_with_one_process, dims, distributed))


def test_a_skipped_step_changes_no_state():
    run_world(2, skipped_step, "soap")


def test_states_reshard(tmp_path: Path):
    """States that are saved under one layout and loaded under another layout are bit-identical."""
    run_world(4, train_and_save, ParallelDims(tp=2, dp=2, ep=2), True, "soap", tmp_path)
    for dims, distributed in (ParallelDims(pp=2, dp=2), True), (ParallelDims(dp=3), False):
        run_world(dims.world_size, load_and_compare, dims, distributed, "soap", tmp_path)


def test_a_model_trains_the_same_under_every_layout(tmp_path: Path) -> None:
    """The test trains in fp64 and includes a resume under another layout."""
    flags = "--optimizer soap --soap-precondition-frequency 2 --num-layers 2"
    path = tmp_path / "rows.json"
    layouts = ["--layouts", "dp2-to-tp2-sp-pp2-dp2"]
    done = run_program("-m", "megatron.testing.parity", "--json", path, *layouts, "--", *flags.split())
    found = json.loads(path.read_text())
    verdicts = [row["verdict"] for row in found]
    assert done.returncode == 0 and verdicts == ["trained", "equal"], done.stdout + done.stderr


def test_factors_have_the_sizes_of_the_dims() -> None:
    meta = ParamMeta("weight", (3, 4, 6), role="hidden", stacked=1)
    assert matrix_size(meta) == (4, 6)
    link = Soap(OptimizerConfig("soap"))
    shapes = {state.name: state.shape for state in link.states(meta)}
    assert shapes["left"] == shapes["left_basis"] == (3, 4, 4) and shapes["right"] == (3, 6, 6)
    assert shapes["rotated_avg"] == shapes["rotated_avg_sq"] == (3, 4, 6)


def test_rounding_errors_do_not_move_directions() -> None:
    """In this test, the gradient covariance maps directions 4 and 5 of the old basis to linear combinations of the
    vectors to which it maps the other directions. The vectors that a QR decomposition computes for these two directions
    and for all later directions therefore depend on rounding errors."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    old, images = torch.linalg.qr(draw(12, 12))[0], draw(6, 12)
    images[:, 4:6] = 0.9 * images[:, :2]
    images[:, :6] *= 10
    factor = old @ images.mT @ images @ old.mT
    (basis, _), (moved, _) = (followed((factor + noise) @ old, old) for noise in (0, 1e-14 * draw(12, 12)))
    torch.testing.assert_close(basis.mT @ basis, torch.eye(12, dtype=torch.float64))
    torch.testing.assert_close(basis[:, :6] @ (basis[:, :6].mT @ factor), factor)
    torch.testing.assert_close(moved, basis, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_independent_columns_are_found_among_dependent_ones(seed: int) -> None:
    """The diagonal of a single QR decomposition does not identify independent columns, because the entries after a
    dependent column depend on rounding errors."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    directions, columns = torch.linalg.qr(draw(16, 16))[0], torch.zeros(16, 16, dtype=torch.float64)
    expected = (draw(16) > 0).tolist()
    for number, is_independent in enumerate(expected):
        columns[:, number] = columns[:, :number] @ draw(number)
        columns[:, number] /= columns[:, number].norm().clamp_min(1e-3)
        if is_independent:  # the distance from the span of earlier columns decreases with the column number
            columns[:, number] += 10 ** (-number / 4) * directions[:, number]
    smallest = 10 ** (-max(number for number in range(16) if expected[number]) / 4)
    for noise in 0, 1e-16:
        basis, found = independent(columns + noise * draw(16, 16), 0.99 * smallest)
        assert found.tolist() == [number for number in range(16) if expected[number]]
        torch.testing.assert_close(basis.mT @ basis, torch.eye(len(found), dtype=torch.float64))


@pytest.mark.parametrize("rows", [slice(0, 3), slice(3, 8)], ids=["first", "last"])
def test_a_gradient_with_few_rows_leaves_the_basis_of_the_others(rows: slice) -> None:
    """The unit vectors of rows with gradients lie in the span of the eigenvectors. Therefore, only the unit vectors of
    the other rows can complete the basis."""
    generator = torch.Generator().manual_seed(5)
    gradient = torch.zeros(8, 20, dtype=torch.float64)
    gradient[rows] = torch.randn(gradient[rows].shape, dtype=torch.float64, generator=generator)
    basis = eigenbasis(gradient @ gradient.mT)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(8, dtype=torch.float64))
    units = torch.eye(8, dtype=torch.float64)
    units[:, rows] = 0
    others = units[:, units.any(0)]
    torch.testing.assert_close(basis[:, -others.shape[1] :].abs(), others)
