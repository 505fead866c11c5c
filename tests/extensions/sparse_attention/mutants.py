"""Mutants of sparse attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.attention.tiles import Documents
from megatron.extensions.latent_attention import multi_latent_attention
from megatron.extensions.sparse_attention import selection, sparse_attention
from megatron.extensions.sparse_attention.selection import Index
from tests.parity.mutants.common import mutant, plant

plant(
    "Gradients of the indexer's norm not summed under sequence parallelism",
    (sparse_attention, "sequence_partial", lambda sequence_parallel: ()),
    world="2",
    tp="2sp",
    layers="sparse",
)
plant(
    "Gradients of latents for selected keys not summed over tp",
    (multi_latent_attention, "copy_to", lambda x, axis: x),
    world="2",
    tp="2",
    layers="sparse",
)
plant(
    "Indexer compared with the heads of one rank",
    (selection, "all_reduce_", lambda x, axis: x),
    world="2",
    tp="2",
    layers="sparse in some",
)
plant(
    "Keys of sparse attention in the order of ranks",
    (sparse_attention, "from_rank_order", lambda x, size: x),
    world="2",
    cp="2ring",
    layers="sparse",
)


@mutant(sparse_attention, "document_begins", world="2", layers="sparse", documents="packed")
def _selection_across_documents(documents: Documents, length: int, device: torch.device) -> Tensor:
    """Keys of other documents are selected on some ranks."""
    found = _true_begins(documents, length, device)
    return found * torch.distributed.get_rank()


_true_begins = sparse_attention.document_begins


@mutant(selection, "divergence", world="2", tp="2sp", layers="sparse in some")
def _key_gradient_without_later_queries(index: Index, loss: Any) -> tuple[Tensor, Index]:
    """Gradients of the indexer's keys from the queries of the first rank."""
    total, found = _true_divergence(index, loss)
    return total, found._replace(k=found.k * (loss.own.start == 0))


_true_divergence = selection.divergence


@mutant(selection, "largest", world="2", cp="2ring", layers="sparse")
def _ties_by_the_number_of_keys(scores: Tensor, topk: int) -> Tensor:
    """Equal scores of the indexer are ordered as a sort finds them."""
    chosen = scores.topk(topk).indices
    return chosen.masked_fill(scores.gather(-1, chosen) == -torch.inf, -1).to(torch.int32)
