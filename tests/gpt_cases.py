"""Tiny models of each style, and random batches for these models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron.core.batch import Batch
from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training.config.flags import with_fields
from tests.extensions import installed

FP64 = ModelParallelConfig(fp64=True)

TABLE = yaml.safe_load((Path(__file__).parent / "fixtures" / "models.yaml").read_text())


def model_of(name: str) -> TransformerConfig:
    """Return a model configuration from fixtures/models.yaml."""
    found = next(models[name] for models in TABLE.values() if name in models)
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items() if key != "needs"}
    base = model_of(given.pop("of")) if "of" in given else TransformerConfig()
    plain = {field.name: given.pop(field.name) for field in fields(TransformerConfig) if field.name in given}
    model = replace(base, **plain)
    return with_fields(model, given) if given else model


GPT, LLAMA, LATENT, DELTA_NET = map(model_of, ("gpt", "llama", "latent", "delta-net"))


def models_in(table: str) -> dict[str, TransformerConfig]:
    """Return the models of a table, keyed by name. Models that need an extension that is not installed are left out."""

    def is_there(needs: str | list[str] | None) -> bool:
        return all(map(installed, needs if isinstance(needs, list) else [needs]))

    return {name: model_of(name) for name, found in TABLE[table].items() if is_there(found.get("needs"))}


STYLES = models_in("styles")


def with_dropout(config: TransformerConfig, attention: float = 0.15, hidden: float = 0.2) -> TransformerConfig:
    return replace(config, attention_dropout=attention, hidden_dropout=hidden)


def random_batch(config: TransformerConfig, samples: int = 3, seed: int = 0, **more: Any) -> Batch:
    """Return a batch of random tokens with a random loss mask and sample numbers that do not start at 0."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(config.vocab_size, (samples, config.seq_length + 1), generator=generator)
    loss_mask = (torch.rand(samples, config.seq_length, generator=generator) < 0.8).float()
    batch = Batch(text[:, :-1], text[:, 1:], loss_mask, torch.arange(samples) + 7, **more)
    return batch.with_future(config.mtp_depths)


def token_losses(model: GPTModel, batch: Batch) -> torch.Tensor:
    """Return the losses [b, s] of all tokens, computed by a model that includes the last pipeline stage."""
    assert model.loss is not None and model.output_layer is not None
    return model.loss(model.output_layer(model.hidden_states(None, batch)), batch.labels.t()).t()


def logits_in_parts(model: GPTModel, tokens: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, Any]:
    """Compute the logits of tokens [b, s] part by part with a cache of the earlier parts. Return the logits and the
    cache. If the extension for text generation is deleted, the calling test is skipped."""
    kv_cache = pytest.importorskip(
        "megatron.extensions.use.inference.generation.kv_cache", reason="inference is deleted"
    )
    cache = kv_cache.KeyValueCache()
    parts = [
        model.logits(None, Batch.of_tokens(part), cache.extend([part.shape[1]] * len(part), part.device))
        for part in tokens.split(list(lengths), dim=1)
    ]
    return torch.cat(parts, 1), cache


def check_documents_apart(model: GPTModel, packed: Batch) -> None:
    """Assert that the logits of packed documents equal those of each document alone."""
    logits = model.logits(None, packed)
    for sample, ids in enumerate(packed.document_ids):
        for document in ids.unique():
            alone = model.logits(None, Batch.of_tokens(packed.tokens[sample : sample + 1, ids == document]))
            torch.testing.assert_close(logits[sample : sample + 1, ids == document], alone, rtol=1e-10, atol=1e-10)


def packed_documents(config: TransformerConfig, samples: int = 3) -> dict[str, torch.Tensor]:
    """Return position ids and document ids for samples that consist of three documents each. The document boundaries
    differ from sample to sample."""
    document_ids = torch.zeros(samples, config.seq_length, dtype=torch.int64)
    position_ids = torch.zeros_like(document_ids)
    for sample in range(samples):
        cuts = [0, 3 + sample, 9 + sample, config.seq_length]
        for number, (start, stop) in enumerate(pairwise(cuts)):
            document_ids[sample, start:stop] = number
            position_ids[sample, start:stop] = torch.arange(stop - start)
    return {"position_ids": position_ids, "document_ids": document_ids}
