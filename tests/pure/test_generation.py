"""Generated text against its definition: the whole text read anew for each token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron.core.batch import Batch
from megatron.core.models.gpt.generation import Sampling, generate
from megatron.core.models.gpt.gpt_model import GPTModel
from tests.gpt_cases import FP64, STYLES

PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6]]


def model_of(style: str) -> GPTModel:
    """Weights that are large enough for its tokens to differ."""
    model = GPTModel(replace(STYLES[style], init_method_std=0.3), FP64).eval()
    return model


def continued(model: GPTModel, prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(int(model.logits(None, Batch.of_tokens(torch.tensor([text])))[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("style", STYLES)
def test_greedy_text_of_prompts_of_different_lengths(style: str) -> None:
    model = model_of(style)
    found = generate(model, PROMPTS, 8)
    assert found == [continued(model, prompt, 8) for prompt in PROMPTS]
    assert len({token for tokens in found for token in tokens}) > 4


def test_text_ends_at_a_stop_token_and_at_the_last_position() -> None:
    model = model_of("gpt")
    full = generate(model, PROMPTS, 100)
    assert [len(tokens) for tokens in full] == [16 - len(prompt) for prompt in PROMPTS]
    stop = full[0][4]
    for tokens, found in zip(full, generate(model, PROMPTS, 100, stop=[stop]), strict=True):
        assert found == (tokens[: tokens.index(stop)] if stop in tokens else tokens)
    assert generate(model, PROMPTS, 0) == [[], [], []]


def test_samples_depend_on_the_seed_and_not_on_other_prompts() -> None:
    model, sampling = model_of("llama"), Sampling(temperature=2.0, top_k=30, top_p=0.95)
    found = generate(model, PROMPTS, 9, sampling, seed=3)
    assert found == generate(model, PROMPTS, 9, sampling, seed=3)
    assert found != generate(model, PROMPTS, 9, sampling, seed=4)
    assert found[:2] == generate(model, PROMPTS[:2], 9, sampling, seed=3)
    assert found[1:] == generate(model, PROMPTS[1:], 9, sampling, seed=3, first=1)
    assert generate(model, PROMPTS, 9, replace(sampling, top_k=1)) == generate(model, PROMPTS, 9)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0), [0.4, 0.1, 0.3, 0.2]),
        (Sampling(0.5), [16 / 30, 1 / 30, 9 / 30, 4 / 30]),
        (Sampling(1.0, top_k=2), [4 / 7, 0, 3 / 7, 0]),
        (Sampling(1.0, top_p=0.75), [4 / 9, 0, 3 / 9, 2 / 9]),
        (Sampling(1.0, top_p=0.69), [4 / 7, 0, 3 / 7, 0]),
        (Sampling(1.0, top_k=3, top_p=0.01), [1.0, 0, 0, 0]),
    ],
)
def test_sampled_tokens_have_their_probabilities(sampling: Sampling, expected: list[float]) -> None:
    draws = 20000
    logits = torch.tensor([0.4, 0.1, 0.3, 0.2]).log().expand(draws, 4)
    uniform = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    counts = torch.bincount(sampling.next_tokens(logits, uniform), minlength=4)
    torch.testing.assert_close(counts / draws, torch.tensor(expected), rtol=0, atol=2e-4)


def test_extreme_random_numbers_choose_tokens_that_are_allowed() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, -torch.inf]])
    for uniform in (0.0, 1 - 2**-53):
        assert Sampling(1.0, top_k=2).next_tokens(logits, torch.tensor([uniform], dtype=torch.float64)) in (1, 2)


def test_user_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"--temperature -1 .*\n--top-k 0 .*\n--top-p 1.5"):
        Sampling(-1, 0, 1.5)
    with pytest.raises(ValueError, match=r"prompt 1 has no tokens(.|\n)*prompt 2 has 16 tokens.*at most 16"):
        generate(GPTModel(STYLES["gpt"]), [[], [1] * 16], 3)
