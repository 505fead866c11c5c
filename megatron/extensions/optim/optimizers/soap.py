"""SOAP (arXiv 2409.11321): Adam in the eigenbasis of Shampoo's two factors, for each hidden-layer matrix.

Shampoo's factors L and R are moving averages of products of the gradient G [m, n] of a matrix:

    L <- beta L + (1 - beta) G G^T   [m, m]
    R <- beta R + (1 - beta) G^T G   [n, n]

The update is Q_L Adam(Q_L^T G Q_R) Q_R^T. The columns of Q_L and Q_R are the eigenvectors of L and R, which were
computed in previous steps. Every --soap-precondition-frequency steps, the bases are updated with a step of power
iteration and a QR decomposition.

The formulas and the order of operations follow the authors' program (github.com/nikhilvyas/SOAP). The first update only
initializes L and R. Weight decay is applied to the updated parameter. One difference from the authors' program keeps
rounding noise out of the update, so that updates agree between layouts. At first, the gradients of a non-square matrix
do not span all directions. In the authors' program, the basis vectors of the other directions are rounding noise. This
implementation keeps their previous basis vectors, which initially are unit vectors. Eigenvectors whose eigenvalues are
just above the noise still differ between layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.optimizer.transforms import (
    ParameterUpdate,
    Requests,
    State,
    Transform,
    matrix_size,
    of_matrices,
)
from megatron.core.param_meta import ParamMeta
from megatron.extensions.optim.optimizers.flags import SoapFlags

SIDES = ("left", "right")

NOISE = 4.0
"""Threshold for noise, as a multiple of the largest eigenvalue's rounding error. Smaller eigenvalues are treated as
noise."""


def soap(config: OptimizerConfig, meta: ParamMeta) -> Sequence[Transform]:
    """Build --optimizer soap for the matrices of hidden layers."""
    return [Soap(config)]


class Soap(Transform):
    """Transform that computes the complete SOAP update, including the learning rate and weight decay."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.options = config.options(SoapFlags)
        self.betas = config.adam_beta1, config.adam_beta2
        self.eps = config.adam_eps
        given = self.options.soap_shampoo_beta
        self.shampoo_beta = config.adam_beta2 if given is None else given

    def sides(self, meta: ParamMeta) -> Iterator[tuple[str, int]]:
        """Yield (side, length) for each side of a matrix, "left" or "right", that has a factor."""
        for side, size in zip(SIDES, matrix_size(meta), strict=True):
            if size <= self.options.soap_max_precondition_dim:
                yield side, size

    def states(self, meta: ParamMeta) -> Sequence[State]:
        moments = [of_matrices(name, meta, *matrix_size(meta)) for name in ("rotated_avg", "rotated_avg_sq")]
        sides = list(self.sides(meta))
        factors = [of_matrices(side, meta, size, size) for side, size in sides]
        return [*moments, *factors, *(of_matrices(f"{side}_basis", meta, size, size) for side, size in sides)]

    def flops(self, meta: ParamMeta) -> int:
        """Return the FLOPs of the matrix products in an update: for the factors, for two changes of basis, and for the
        power iteration. A power iteration and the two changes of basis that it requires do not run in every update.
        Their FLOPs are divided by the number of updates between power iterations."""
        every = self.options.soap_precondition_frequency
        area, sizes = prod(matrix_size(meta)), [size for _, size in self.sides(meta)]
        per_update, per_iteration = 3 * area * sum(sizes), sum(size**3 for size in sizes) + 2 * area * sum(sizes)
        return 2 * prod(meta.global_shape[: meta.stacked]) * (per_update + per_iteration // every)

    def update(self, x: ParameterUpdate) -> Requests:
        done = int(x.step.item()) - 1
        """Number of earlier updates of this parameter. This is also the number of Adam updates including this one,
        because the first update only initializes the factors."""

        def moved(matrix: Tensor, states: dict[str, Tensor]) -> Tensor:
            return self.direction(matrix, states, done, self.eps * x.eps_mult)

        direction = yield from x.whole(x.update, moved)
        if not done:
            x.update = torch.zeros_like(direction)
            return
        corrections = [1 - beta**done for beta in self.betas]
        step = direction * (-x.lr * corrections[1] ** 0.5 / corrections[0])
        x.update = step - x.lr * x.weight_decay * (x.param + step)

    def direction(self, matrix: Tensor, states: dict[str, Tensor], done: int, eps: float) -> Tensor:
        """Update the factors of a matrix [m, n], and return the direction of its update, without Adam's bias
        corrections.

        The gradient is added to the factors only after the direction is computed. The basis into which a gradient is
        rotated therefore does not depend on this gradient.

        Args:
            matrix: Gradient [m, n].
            states: Optimizer states of the matrix, updated in place.
            done: Number of updates before this one.
            eps: Adam's epsilon.
        """
        basis = [states.get(f"{side}_basis") for side in SIDES]
        direction = matrix
        if done:
            rotated = rotate(matrix, basis)
            average, square = states["rotated_avg"], states["rotated_avg_sq"]
            average.mul_(self.betas[0]).add_(rotated, alpha=1 - self.betas[0])
            square.mul_(self.betas[1]).add_(rotated.square(), alpha=1 - self.betas[1])
            direction = rotate(average / square.sqrt().add_(eps), basis, back=True)
        for side, gram in ("left", lambda: matrix @ matrix.mT), ("right", lambda: matrix.mT @ matrix):
            if side in states:
                states[side].lerp_(gram(), 1 - self.shampoo_beta)
        if not done:
            for side in SIDES:
                if side in states:
                    states[f"{side}_basis"].copy_(eigenbasis(states[side]))
        elif done % self.options.soap_precondition_frequency == 0:
            follow(states, basis)
        return direction


def rotate(matrix: Tensor, basis: Sequence[Tensor | None], back: bool = False) -> Tensor:
    """Rotate a matrix X: return Q_L^T X Q_R. If `back` is True, return the inverse rotation Q_L X Q_R^T. If `basis` is
    None on one side, X is rotated only on the other side."""
    left, right = (None if each is None else each.mT if back else each for each in basis)
    matrix = matrix if left is None else left.mT @ matrix
    return matrix if right is None else matrix @ right


def follow(states: dict[str, Tensor], basis: Sequence[Tensor | None]) -> None:
    """Take one step of power iteration for each factor.

    The average of gradients is rotated into the new bases. The average of squared gradients cannot be rotated, so only
    its entries are reordered with the directions.
    """
    average = rotate(states["rotated_avg"], basis, back=True)
    for dim, side in enumerate(SIDES):
        if side in states:
            old = states[f"{side}_basis"]
            power = states[side] @ old
            new, order = followed(power, old)
            states[f"{side}_basis"].copy_(new)
            states["rotated_avg_sq"].copy_(states["rotated_avg_sq"].index_select(dim, order))
    new_basis = [states.get(f"{side}_basis") for side in SIDES]
    states["rotated_avg"].copy_(rotate(average, new_basis))


def followed(power: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """Return a new orthonormal basis of a factor, and the order of directions in this basis. `power` is the factor
    times its old basis. The columns of `power` may be linearly dependent up to rounding errors. Dependent directions
    come last and are derived from the old basis. From the first dependent direction on, a QR decomposition would
    compute only rounding errors.
    """
    values = (old * power).sum(0)
    order = torch.where(values > noise_of(values), values, 0).argsort(descending=True, stable=True)
    basis, triangle = torch.linalg.qr(power[:, order])
    sizes = triangle.diagonal().abs()
    noise = noise_of(sizes)
    if (sizes > noise).all():
        return basis, order
    basis, found = independent(power[:, order], float(noise))
    lacks = torch.ones_like(order, dtype=torch.bool)
    lacks[found] = False
    order = torch.cat((order[found], order[lacks]))
    return completed(basis, old[:, order]), order


def independent(columns: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    """Find the columns that are linearly independent of all independent columns before them.

    A single QR decomposition identifies only the first dependent column reliably. That column adds to the basis a
    direction that consists of rounding errors, and later columns are then compared with this wrong basis.

    Args:
        columns: Vectors [n, count].
        noise: Largest distance from the span of earlier independent columns at which a column counts as dependent.

    Returns:
        An orthonormal basis [n, found] of the independent columns, and the indices [found] of these columns.
    """
    basis, found = columns[:, :0], torch.arange(0, device=columns.device)
    left = torch.arange(columns.shape[1], device=columns.device)
    while len(left):
        rest = columns[:, left]
        for _ in range(2):  # project twice, because one projection leaves rounding errors
            rest = rest - basis @ (basis.mT @ rest)
        distant = rest.norm(dim=0) > noise
        left, rest = left[distant], rest[:, distant]
        more, triangle = torch.linalg.qr(rest)
        near = (triangle.diagonal().abs() <= noise).nonzero()
        count = int(near[0]) if len(near) else more.shape[1]
        basis = torch.cat((basis, more[:, :count]), dim=1)
        found, left = torch.cat((found, left[:count])), left[count:]
    return basis, found


def eigenbasis(factor: Tensor) -> Tensor:
    """Return the eigenvectors of a factor as columns, the largest eigenvalue first.

    LAPACK computes the eigenvectors in fp64, because it may not converge in fp32.
    """
    values, vectors = torch.linalg.eigh(factor.double())
    values, vectors = values.flip(0).to(factor.dtype), vectors.flip(1).to(factor.dtype)
    found = values > noise_of(values)
    if found.all():
        return vectors
    unit_vectors = torch.eye(len(values), dtype=factor.dtype, device=factor.device)
    return completed(vectors[:, found], unit_vectors)


def noise_of(sizes: Tensor) -> Tensor:
    """Return the magnitude below which values are rounding errors of the largest value."""
    return NOISE * len(sizes) ** 0.5 * torch.finfo(sizes.dtype).eps * sizes.amax()


def completed(basis: Tensor, others: Tensor) -> Tensor:
    """Complete the orthonormal columns of `basis` [n, count] to a basis of all n dimensions. The new columns are
    derived from the orthonormal columns of `others` [n, n].

    Candidates are first the last n - count columns of `others`, and then the remaining columns of `others`. A candidate
    is skipped if its distance from the span of the previous columns is less than 1 / (2 sqrt n), because its direction
    would be mostly rounding error. There are always enough candidates, because the squared distances of n orthonormal
    vectors from a span sum to the number of dimensions that the span lacks.
    """
    size, count = basis.shape
    candidates = torch.cat((basis, others[:, count:], others[:, :count]), dim=1)
    return independent(candidates, 0.5 * size**-0.5)[0]
