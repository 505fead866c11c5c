"""Fixtures for tests/gpu that run several ranks. The ranks communicate over gloo, or over NCCL with all ranks on one
GPU (--nccl-on-one-gpu)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch


@dataclass(frozen=True)
class Ranks:
    """Backend of the ranks in a test, and the device of the ranks' tensors."""

    backend: str = "gloo"
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.backend} on {self.device}"


GLOO, SHARED_GPU, NCCL = Ranks(), Ranks("gloo", "cuda"), Ranks("nccl", "cuda")


def nccl_ranks(request: pytest.FixtureRequest) -> Ranks:
    """Return the backend and device for the test. The default is NCCL with the first GPU. If `--nccl-on-one-gpu cpu`
    requests a trial run without a GPU, return gloo with the CPU. Skip the test if --nccl-on-one-gpu is not given."""
    asked = request.config.getoption("--nccl-on-one-gpu")
    if asked is None:
        pytest.skip("needs --nccl-on-one-gpu")
    if asked == "cpu":
        return GLOO
    if torch.cuda.device_count() == 0 or not torch.distributed.is_nccl_available():
        pytest.skip("needs a GPU and a torch with NCCL")
    return NCCL


def ranks_of(request: pytest.FixtureRequest, ranks: Ranks) -> Ranks:
    """Return `ranks` if this machine can run them. Otherwise, skip the test."""
    if ranks == NCCL:
        return nccl_ranks(request)
    if ranks.device == "cuda" and torch.cuda.device_count() == 0:
        pytest.skip("needs a GPU")
    return ranks
