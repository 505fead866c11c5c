"""Mutants of short convolutions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.attention.tiles import Documents
from megatron.core.collectives import swap_blocks
from megatron.core.config.model import TransformerConfig
from megatron.extensions.short_convolution import short_convolution
from megatron.extensions.short_convolution.parameters import ConvolutionParameters
from tests.parity.mutants.common import mutant, plant


@mutant(short_convolution, "convolved", layers="convolutions", documents="packed", world="2")
def _across_documents(x: Tensor, weight: Tensor, bias: Tensor, number: Tensor | None, before: Tensor | None) -> Any:
    """Short convolutions cross the borders of documents on some ranks."""
    return _true_convolved(x, weight, bias, None if torch.distributed.get_rank() else number, before)


_true_convolved = short_convolution.convolved


@mutant(short_convolution, "local_slice", world="2", cp="2ulysses", layers="convolutions")
def _first_channels(x: Tensor, axis: Any) -> Tensor:
    """Short convolutions with the taps of the first context rank."""
    return x[: len(x) // axis.size]


@mutant(short_convolution, "documents_begun", world="2", cp="2ring", layers="convolutions", documents="packed")
def _documents_of_own_rows(documents: Documents, length: int, device: torch.device) -> Tensor:
    """Short convolutions with the documents of a part of the sequence."""
    return _true_begun(documents, length, device)[: length // 2].repeat(2, 1)


_true_begun = short_convolution.documents_begun


plant(
    "Short convolutions read a sequence in order of ranks",
    (short_convolution, "sequence_to_heads", lambda x, cp: swap_blocks(x.movedim(2, 0), cp).flatten(0, 1)),
    (
        short_convolution,
        "heads_to_sequence",
        lambda x, cp: swap_blocks(x.unflatten(0, (cp.size, -1)), cp).movedim(0, 2),
    ),
    world="2",
    cp="2gather",
    layers="convolutions",
)


@mutant(short_convolution, "convolution_parameters", world="2", tp="2sp", layers="convolutions")
def _bias_summed(name: str, config: TransformerConfig) -> ConvolutionParameters:
    """Gradient of a short convolution's bias summed over tensor-parallel ranks."""
    found = _true_parameters(name, config)
    assert found.conv_bias is not None
    return replace(found, conv_bias=replace(found.conv_bias, partial_over=("tp",)))


_true_parameters = short_convolution.convolution_parameters
