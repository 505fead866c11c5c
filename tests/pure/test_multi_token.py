"""Compare multi-token prediction in one process with an implementation of its formula in plain torch. The tests also
check which later tokens count in the losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.batch import FUTURE, Batch, BatchContext
from megatron.core.config.losses import LOSSES
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.loss import CrossEntropy
from megatron.training.config.run_config import RunConfig
from megatron.training.config.saved_flags import changed_fields
from tests.gpt_cases import FP64, GPT, LLAMA, packed_documents, random_batch
from tests.rules import problems

CONFIG = replace(GPT, num_layers=3, mtp_num_layers=2, mtp_loss_scaling_factor=0.3)


def losses_written_out(model: GPTModel, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Return the sum of the main losses, and the sums of the losses for the two prediction depths. The function
    implements the formula of arXiv 2412.19437 with the norms, projections and layers of the model. The function
    determines for each token separately whether the loss of the token counts."""
    b, s = batch.tokens.shape
    words, table = model.embedding.word_embeddings.weight, model.embedding.position_embeddings.weight
    positions = torch.arange(s).expand(b, s) if batch.position_ids is None else batch.position_ids
    x, losses, modules = model.hidden_states(None, batch), [], model.mtp.layers if model.mtp is not None else []
    for k in range(CONFIG.mtp_depths + 1):
        if k:
            module: Any = modules[k - 1]
            later = torch.arange(s) + k
            inside = later < s
            later = later.clamp(max=s - 1)
            # Tokens beyond the end of the sample have no effect, because their loss does not count and no earlier token
            # attends to them.
            embedded = words[batch.tokens[:, later] * inside] + table[positions[:, later] * inside]
            pair = torch.cat((module.enorm(embedded.transpose(0, 1)), module.hnorm(x)), -1)
            x = module.transformer(module.eh_proj(pair), BatchContext.of(batch))
        logs = (x @ words.t())[..., : CONFIG.vocab_size].log_softmax(-1)
        terms = [
            -logs[i, row, batch.labels[row, i + k]]
            for row in range(b)
            for i in range(s - k)
            if all(batch.loss_mask[row, i + j] for j in range(k + 1)) and (not k or same_document(batch, row, i, k))
        ]
        losses.append(torch.stack(terms).sum())
    return losses[0], losses[1:]


def same_document(batch: Batch, row: int, i: int, k: int) -> bool:
    """Return True if the label k positions after the label of token i is in the same document. For a label beyond the
    end of the sample, the document of the last token is compared instead."""
    if batch.document_ids is None:
        return True
    last = min(i + k + 1, batch.tokens.shape[1] - 1)
    return bool(batch.document_ids[row, i] == batch.document_ids[row, last])


@pytest.mark.parametrize("packed", [False, True])
def test_losses_and_gradients_match_the_formula(packed: bool) -> None:
    model = GPTModel(CONFIG, FP64)
    batch = random_batch(CONFIG, samples=3, **(packed_documents(CONFIG) if packed else {}))
    loss = model(None, batch)
    loss.backward()
    main, further = losses_written_out(model, batch)
    s, parameters = CONFIG.seq_length, {name: parameter for name, (parameter, _) in model.named_metas().items()}
    objective = main + 0.3 / 2 * (further[0] * s / (s - 1) + further[1] * s / (s - 2))
    expected = torch.autograd.grad(objective, list(parameters.values()))
    torch.testing.assert_close(loss, main, rtol=1e-12, atol=0)
    assert model.mtp is not None
    torch.testing.assert_close(model.mtp.tally[:, 0], torch.stack(further).detach(), rtol=1e-12, atol=0)
    for (name, parameter), gradient in zip(parameters.items(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12, msg=name)
    assert {f"mtp.layers.{depth}.eh_proj.weight" for depth in (0, 1)} <= parameters.keys()


@pytest.mark.parametrize(("kind", "full"), [("own_number", (False, True)), ("last_layer", (False, False))])
def test_modules_count_as_layers_of_their_own_or_follow_the_last_layer(kind: str, full: tuple[bool, ...]) -> None:
    config = replace(LLAMA, num_layers=3, mtp_num_layers=2, mtp_layer_kind=kind, window_size=4, no_rope_freq="2")
    config = replace(config, window_attn_skip_freq="2")
    assert tuple(each.span.window is None for each in config.mtp_layers) == full
    assert tuple(each.rotation is None for each in config.mtp_layers) == full
    assert replace(config, no_rope_freq="[0,1,0]", window_attn_skip_freq="[1,0,1]").mtp_layers == config.mtp_layers
    model = GPTModel(config, FP64)
    assert model.mtp is not None
    built: list[Any] = [module.transformer for module in model.mtp.layers]
    assert tuple(block.layers[0].self_attention.core.span.window is None for block in built) == full
    assert tuple(not block.rotary for block in built) == full


def test_evaluation_uses_only_the_main_loss() -> None:
    batch, plain = random_batch(CONFIG), GPTModel(replace(CONFIG, mtp_num_layers=None), FP64)
    model = GPTModel(CONFIG, FP64)
    assert torch.equal(model.eval()(None, replace(batch, **dict.fromkeys(FUTURE))), plain.eval()(None, batch))
    assert torch.equal(model.logits(None, batch), plain.logits(None, batch))
    assert model.mtp is not None and not model.mtp.tally.any()
    model.train()(None, batch)
    assert model.mtp.tally[:, 1].tolist() == batch.future_loss_mask.sum((0, 1)).tolist()  # type: ignore[union-attr]


def test_a_resumed_run_may_change_the_factor_and_not_the_depths() -> None:
    def run(depths: int | None, factor: float) -> RunConfig:
        return RunConfig(model=replace(GPT, mtp_num_layers=depths, mtp_loss_scaling_factor=factor))

    assert changed_fields(run(1, 0.3), run(1, 0.1), ("model",)) == []
    assert changed_fields(run(None, 0.3), run(0, 0.1), ("model",)) == []
    assert changed_fields(run(1, 0.3), run(2, 0.3), ("model",)) == [
        "--mtp-num-layers 1 in the checkpoint, 2 in the run"
    ]


def test_an_incompatible_loss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOSSES, "_entries", dict(LOSSES._entries))
    LOSSES.register("pairs", CrossEntropy)
    LOSSES.register("shifted", CrossEntropy, multi_token=True)
    assert problems("--mtp-num-layers 1 --loss-func shifted") == []
    assert problems("--mtp-num-layers 1 --loss-func pairs") == [
        "--mtp-num-layers 1: needs a loss that supports labels of later tokens, which --loss-func pairs does not "
        "declare; remove --mtp-num-layers, or register the loss with multi_token=True if it needs only logits and label"
    ]
