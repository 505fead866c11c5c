"""The backward pass of each collective A must be its adjoint A', that is, <Ax, y> = <x, A'y> for all x and y. The tests
also cover the fast path for a single rank. tests/parity/test_matrix.py checks the values that the collectives
compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.core import collectives as m
from megatron.core.parallel_state import Axis, initialize_model_parallel
from tests.harness import run_world


def operand(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank + 1))


# Each collective is a linear map from the operands of all ranks to the results on all ranks. Inner products are
# therefore summed over the ranks. If a tensor is replicated, such as the result of gather_from, its values are counted
# once instead of once per rank.
SHARDED_MAPS: dict[str, tuple[Callable[[Tensor, Axis], Tensor], bool, bool]] = {
    # name: (collective, whether its operand is replicated, whether its result is replicated)
    "copy": (m.copy_to, True, False),
    "reduce": (m.reduce_from, False, True),
    "gather": (lambda x, tp: m.gather_from(x, tp, 1), False, True),
    "all_gather_sequence": (m.all_gather_sequence, False, False),
}


def adjointness(rank: int, size: int, name: str) -> None:
    function, common_in, common_out = SHARDED_MAPS[name]
    tp = initialize_model_parallel(size).tp
    x = operand(0 if common_in else rank, 4, 8, 3).requires_grad_()
    ax = function(x, tp)
    y = operand(50 + (0 if common_out else rank), *ax.shape).requires_grad_()
    (aty,) = torch.autograd.grad(ax, x, y, create_graph=True)

    def inner(a: Tensor, b: Tensor, common: bool) -> Tensor:
        product = (a * b).sum().detach()
        return product if common else m.all_reduce_(product.clone(), tp)

    torch.testing.assert_close(inner(ax, y, common_out), inner(x, aty, common_in))
    # The backward pass A' can itself be differentiated. Its adjoint is A, so the gradient of <A'y, z> with respect to y
    # is A z.
    z = operand(100 + (0 if common_in else rank), *x.shape)
    (az,) = torch.autograd.grad(aty, y, z)
    torch.testing.assert_close(az, function(z, tp).detach())


@pytest.mark.parametrize("name", list(SHARDED_MAPS))
def test_backward_passes_are_the_adjoints(name: str) -> None:
    run_world(2, adjointness, name)


@pytest.mark.parametrize("name", list(SHARDED_MAPS))
def test_size_one_returns_its_operand(name: str) -> None:
    x = torch.randn(2, 2, 2, requires_grad=True)
    assert SHARDED_MAPS[name][0](x, Axis()) is x
    assert m.all_reduce_(x, Axis()) is x
    assert m.all_gather(x, Axis(), 1) is x
    assert m.reduce_scatter(x, Axis()) is x


def test_a_dim_that_does_not_divide_is_an_error() -> None:
    with pytest.raises(AssertionError, match=r"dim 1 of \(4, 7\) does not divide"):
        m.local_slice(torch.zeros(4, 7), Axis(None, 0, 2, (0, 1)), 1)
