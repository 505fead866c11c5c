"""SOAP (arXiv 2409.11321): Adam in the eigenbasis of Shampoo's two factors, for each hidden-layer matrix.

Shampoo's factors L and R are moving averages of products of the gradient G [m, n] of a matrix:

    L <- beta L + (1 - beta) G G^T   [m, m]
    R <- beta R + (1 - beta) G^T G   [n, n]

The update is Q_L Adam(Q_L^T G Q_R) Q_R^T. The columns of Q_L and Q_R are approximate eigenvectors of L and R, which
were computed in previous steps. Every --soap-precondition-frequency steps, the bases are updated with a step of power
iteration and a QR decomposition.

The formulas and the order of operations follow the authors' program (github.com/nikhilvyas/SOAP). The first update only
initializes L and R. Weight decay is applied to the updated parameter. There is one difference from the authors'
program. In the first steps, the gradients of a non-square matrix do not span all directions. In the authors' program,
the basis vectors of the remaining directions then consist of rounding errors. This implementation instead derives these
basis vectors from the previous basis vectors, which initially are unit vectors. As a result, updates under different
parallel layouts agree, except for eigenvectors whose eigenvalues are only slightly larger than the rounding errors.
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
"""Constant factor of the threshold below which eigenvalues are considered rounding errors; see `noise_of`."""


def soap(config: OptimizerConfig, meta: ParamMeta) -> Sequence[Transform]:
    """Return the transforms of --optimizer soap for a matrix of a hidden layer."""
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
        """Yield (side, size) for each Shampoo factor of a matrix: "left" for L, and "right" for R. A side that is
        longer than --soap-max-precondition-dim has no factor."""
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
        power iteration. The power iteration, which includes two further changes of basis, does not run in every update.
        The FLOPs of a power iteration are divided by the number of updates between power iterations."""
        every = self.options.soap_precondition_frequency
        area, sizes = prod(matrix_size(meta)), [size for _, size in self.sides(meta)]
        per_update, per_iteration = 3 * area * sum(sizes), sum(size**3 for size in sizes) + 2 * area * sum(sizes)
        return 2 * prod(meta.global_shape[: meta.stacked]) * (per_update + per_iteration // every)

    def update(self, x: ParameterUpdate) -> Requests:
        done = int(x.step.item()) - 1
        """Number of previous updates of this parameter. This number equals the number of Adam updates, including the
        current update, because the first update only initializes the factors."""

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
        """Return the direction of a matrix update, without Adam's bias corrections, and update the factors of the
        matrix.

        The gradient is added to the factors only after the direction is computed. The basis into which a gradient is
        rotated therefore does not depend on this gradient.

        Args:
            matrix: [m, n], gradient of the matrix.
            states: Optimizer states of the matrix, updated in place.
            done: Number of previous updates.
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
    """Rotate a matrix X: return Q_L^T X Q_R. If `back` is True, return the inverse rotation Q_L X Q_R^T. If one of the
    two matrices in `basis` is None, X is not rotated on the corresponding side."""
    left, right = (None if each is None else each.mT if back else each for each in basis)
    matrix = matrix if left is None else left.mT @ matrix
    return matrix if right is None else matrix @ right


def follow(states: dict[str, Tensor], basis: Sequence[Tensor | None]) -> None:
    """Take one step of power iteration for each factor in `states`, and update the bases in `states` in place. `basis`
    contains the bases before the step.

    The average of gradients is rotated to the new bases. The average of squared gradients cannot be rotated; its
    entries are only reordered in the same way as the basis vectors.
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
    """Return a new orthonormal basis of a factor, and the order of the old basis vectors in the new basis. `power` is
    the product of the factor and the `old` basis. The columns of `power` may be linearly dependent up to rounding
    errors. From the first dependent column on, a QR decomposition would compute only rounding errors. Dependent columns
    are therefore moved to the end, and replaced with vectors that are derived from the old basis.
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
    """Find linearly independent columns. A column is selected if it is linearly independent of all columns that were
    selected before it.

    A single QR decomposition identifies only the first dependent column reliably. For this column, the decomposition
    adds a direction of rounding errors to the basis, and compares later columns with this wrong basis.

    Args:
        columns: Vectors [n, count].
        noise: A column is considered dependent if its distance from the span of the previous independent columns is at
            most this number.

    Returns:
        An orthonormal basis [n, found] of the independent columns, and the indices [found] of these columns.
    """
    basis, found = columns[:, :0], torch.arange(0, device=columns.device)
    left = torch.arange(columns.shape[1], device=columns.device)
    while len(left):
        rest = columns[:, left]
        # Project twice, because a single projection leaves rounding errors.
        for _ in range(2):
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
    """Return the eigenvectors of a factor as columns, in descending order of the eigenvalues.

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
    """Return the threshold below which values in `sizes` are considered rounding errors of the largest value."""
    return NOISE * len(sizes) ** 0.5 * torch.finfo(sizes.dtype).eps * sizes.amax()


def completed(basis: Tensor, others: Tensor) -> Tensor:
    """Complete the orthonormal columns of `basis` [n, count] to a basis of all n dimensions. The new columns are
    derived from the orthonormal columns of `others` [n, n].

    The first candidates for new columns are the last n - count columns of `others`, followed by the other columns of
    `others`. A candidate is skipped if its distance from the span of the previous columns is at most 1 / (2 sqrt n).
    A candidate so close to the span would result in a direction that consists mostly of rounding errors. There are
    always enough candidates: the squared distances of n orthonormal vectors from a span add up to the number of missing
    dimensions.
    """
    size, count = basis.shape
    candidates = torch.cat((basis, others[:, count:], others[:, :count]), dim=1)
    return independent(candidates, 0.5 * size**-0.5)[0]
