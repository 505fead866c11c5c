"""Compare generated text with the text of a reference implementation, which reads the whole text again for each new
token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.core.batch import Batch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tokenizers import ByteTokenizer, NullTokenizer, Tokenizer
from megatron.extensions.use.inference.generation import Engine, Generation, Request, Sampling, StageRunner
from megatron.extensions.use.inference.generation.text import TextStream
from tests.gpt_cases import FP64, STYLES
from tests.moe_cases import MIXTRAL

MIXED = "latent sparse compressed delta-net mamba attention-and-mamba mamba1 rg-lru convolution kimi-delta lightning"
MIXERS = [style for style in MIXED.split() if style in STYLES]
"""Model styles with mixers of installed extensions."""

PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6]]


def model_of(style: str) -> GPTModel:
    """Return a model with large weights, so that the model generates varied tokens."""
    model = GPTModel(replace(STYLES[style], init_method_std=0.3), FP64).eval()
    return model


def generate(model: GPTModel, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Return the new tokens that greedy decoding generates for each prompt."""
    requests = [Request(each, count) for each in prompts]
    return [found.tokens for found in Engine(StageRunner({0: model}), rows=3).run(requests)]


@pytest.mark.parametrize("style", ["llama", "mistral", "chunks-in-some", "gpt-oss", *MIXERS, "moe"])
def test_batched_texts_have_the_same_logprobs_as_alone(style: str) -> None:
    """The same requests are served one by one and in batches. In the batches, requests wait for a free row, end early
    and are padded. In generation, experts do not drop tokens, so the logits of a text do not depend on the other texts
    of a batch."""
    sampling = Sampling(0.8, top_p=0.95, repetition_penalty=1.3)
    requests = [
        Request(PROMPTS[i % 3], 2 + i, replace(sampling, top_k=20) if i % 2 else sampling, seed=i, logprobs=3)
        for i in range(7)
    ]
    requests[5] = replace(requests[5], prompt_logprobs=True)
    model = reference = model_of(style) if style != "moe" else GPTModel(MOE, FP64).eval()
    if style == "moe":
        model = GPTModel(replace(MOE, moe_expert_capacity_factor=1.0), FP64).eval()
    together = list(Engine(StageRunner({0: model}), rows=3, prefill_tokens=8).run(requests))
    for request, found in zip(requests, together, strict=True):
        (alone,) = Engine(StageRunner({0: model}), rows=1).run([request])
        assert found.tokens == alone.tokens and len(found.tokens) == request.max_new_tokens
        assert_same_logprobs(found, alone)
        text = [*request.prompt, *found.tokens]
        whole = reference.logits(None, Batch.of_tokens(torch.tensor([text])))[0].log_softmax(-1)
        own = [float(whole[place, token]) for place, token in enumerate(text[1:])]
        assert [each.logprob for each in found.logprobs] == pytest.approx(own[len(request.prompt) - 1 :], abs=1e-12)
        if request.prompt_logprobs:
            assert [each.logprob for each in found.prompt_logprobs] == pytest.approx(own[: len(request.prompt) - 1])
            assert found.prompt_logprobs[0].top[0][1] == pytest.approx(float(whole[0].max()), abs=1e-12)


MOE = replace(MIXTRAL, init_method_std=0.3)


def assert_same_logprobs(one: Generation, other: Generation) -> None:
    for a, b in zip(one.logprobs + one.prompt_logprobs, other.logprobs + other.prompt_logprobs, strict=True):
        assert a.token == b.token and a.logprob == pytest.approx(b.logprob, abs=1e-12)
        assert [token for token, _ in a.top] == [token for token, _ in b.top] and len(a.top) == 3


PROBABILITIES = [
    (Sampling(1.0), [0.4, 0.1, 0.3, 0.2]),
    (Sampling(0.5), [16 / 30, 1 / 30, 9 / 30, 4 / 30]),
    (Sampling(1e-6), [1.0, 0, 0, 0]),
    (Sampling(2.0, top_k=1), [1.0, 0, 0, 0]),
    (Sampling(1.0, top_k=2), [4 / 7, 0, 3 / 7, 0]),
    (Sampling(1.0, top_p=0.75), [4 / 9, 0, 3 / 9, 2 / 9]),
    (Sampling(1.0, top_p=0.69), [4 / 7, 0, 3 / 7, 0]),
    (Sampling(1.0, top_k=3, top_p=0.01), [1.0, 0, 0, 0]),
    (Sampling(1.0, min_p=0.6), [4 / 7, 0, 3 / 7, 0]),
    (Sampling(1.0, min_p=1.0), [1.0, 0, 0, 0]),
    (Sampling(1.0, top_p=0.95, min_p=0.4), [4 / 9, 0, 3 / 9, 2 / 9]),
]


@pytest.mark.parametrize(("sampling", "expected"), PROBABILITIES)
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


def test_errors_state_a_remedy() -> None:
    for wrong in ({"temperature": 1e-320}, {"repetition_penalty": 1e-320}, {"repetition_penalty": 1e308}):
        with pytest.raises(ValueError, match=r"must be .*from .* to 1,000"):
            Sampling(**wrong)
    flags = r"--temperature -1 .*\n--top-k 0 .*\n--top-p 1.5 .*\n--min-p 2 .*\n--rep.* 0 "
    with pytest.raises(ValueError, match=flags):
        Sampling(-1, 0, 1.5, 2, 0)
    fields = r"no tokens.*\nmax_new_tokens -1 .*\na stop string must not be empty.*\nlogprobs"
    with pytest.raises(ValueError, match=fields):
        Request([], -1, stop=("a", ""), logprobs=101)
    (found,) = Engine(StageRunner({0: GPTModel(STYLES["gpt"])})).run([Request([1] * 16, 3)])
    assert str(found.error).startswith("has 16 tokens, but the model reads at most 16")


def test_a_penalty_makes_tokens_of_the_text_less_likely() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, -1.1]]).repeat(2, 1)
    uniform = torch.zeros(2, dtype=torch.float64)
    assert Sampling(repetition_penalty=1.2).next_tokens(logits, uniform, [[3], [0, 0]]).tolist() == [0, 1]
    only = torch.tensor([[-1.0, -1.1]])
    assert Sampling(repetition_penalty=1.2).next_tokens(only, uniform[:1], [[0]]).tolist() == [1]
    assert logits[0].tolist() == pytest.approx([2.0, 1.9, -1.0, -1.1])


def test_logits_of_any_size_give_valid_tokens() -> None:
    logits = torch.tensor([[3e38, 2e38, -3e38], [torch.nan, 1.0, 2.0], [-torch.inf] * 3, [torch.inf, 0.0, 1.0]])
    uniform, texts = torch.full((4,), 0.5, dtype=torch.float64), [[0, 2], [1], [0], [0]]
    for sampling in (Sampling(), Sampling(1.0), Sampling(1.0, top_k=2, top_p=0.5, min_p=0.5)):
        for penalty in (1e-3, 1.0, 1e3):
            found = replace(sampling, repetition_penalty=penalty).next_tokens(logits, uniform, texts).tolist()
            assert found[0] == int(penalty > 1) and all(0 <= token < 3 for token in found)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), NullTokenizer(101)], ids=["bytes", "numbers"])
def test_streamed_pieces_join_to_the_text(tokenizer: Tokenizer) -> None:
    """The text has characters of up to four bytes, and bytes that are not valid UTF-8."""
    tokens = list("aß漢😀".encode() + b"\xff\xe6\xbcA\xf0\x9f\x98") if tokenizer.vocab_size > 256 else [5, 17, 3]
    for length in range(len(tokens) + 1):
        stream = TextStream(tokenizer.detokenize, tokens[:3], ())
        pieces = [stream.add(token) for token in tokens[3 : 3 + length]]
        whole = tokenizer.detokenize(tokens[: 3 + length])[len(tokenizer.detokenize(tokens[:3])) :]
        assert "".join([*pieces, stream.finish()]) == whole
        assert "\ufffd" not in "".join(pieces[:6])


STOPPED = [
    (["def"], "abc ", ["a", "b", "c", " ", "", "", ""]),
    (["ef", "c "], "ab", ["a", "b", "", ""]),
    (["xyz"], "abc def abc", None),
    (["abcd", "c d"], "ab", None),
    (["f abcx"], "abc def abc", ["a", "b", "c", " ", "d", "e", "", "", "", "", ""]),
]


@pytest.mark.parametrize(("stop", "expected", "pieces"), STOPPED)
def test_stop_strings_may_span_tokens(stop: list[str], expected: str, pieces: list[str] | None) -> None:
    stream, found = TextStream(ByteTokenizer().detokenize, b"x", stop), []
    for token in b"abc def abc":
        found.append(stream.add(token))
        if stream.stopped:
            break
    assert pieces is None or found == pieces
    assert "".join(found) + stream.finish() == expected
    assert stream.stopped == (expected != "abc def abc")


def words(ids: Sequence[int]) -> str:
    return "".join(chr(97 + id % 26) for id in ids)


def test_finish_reasons_are_reported() -> None:
    model = model_of("llama")
    engine = Engine(StageRunner({0: model}), words, rows=2)
    (free,) = engine.run([Request(PROMPTS[0], 10**9)])
    assert free.finish_reason == "length" and len(free.tokens) == 13 and free.text == words(free.tokens)
    stop, third = words(free.tokens[3:5]), frozenset(free.tokens[2:3])
    ends: list[dict[str, Any]] = [{"stop": (stop,)}, {"stop_ids": third}, {"eos_ids": third}]
    requests = [Request(PROMPTS[0], 9, **each) for each in ends]
    others = Request(PROMPTS[0], 0), Request([5] * 16, 3), Request([5, 101], 3)
    stopped, ended, cut, *found = engine.run([*requests, *others])
    assert (stopped.finish_reason, stopped.text) == ("stop", free.text[: free.text.index(stop)])
    assert ended.text == cut.text == free.text[:2] and (ended.finish_reason, cut.finish_reason) == ("stop", "eos")
    assert [(each.finish_reason, each.text) for each in found] == [("length", ""), ("error", ""), ("error", "")]
    assert engine.idle


def test_a_cancelled_request_frees_its_row_for_one_that_waits() -> None:
    engine = Engine(StageRunner({0: model_of("llama")}), rows=1)
    first, second = (engine.submit(Request(PROMPTS[0], 10**9)) for _ in range(2))
    engine.step()
    assert first.tokens and not second.tokens
    engine.cancel(first)
    while not engine.idle:
        engine.step()
    assert first.finish_reason == "cancelled" and len(first.tokens) == 2
    assert second.tokens == generate(engine.runner.stages[0], [PROMPTS[0]], 100)[0]


def test_non_finite_logits_end_only_their_request() -> None:
    """A later request reuses the cache row of the failed request. No NaN may remain in this row."""
    model = model_of("llama")
    clean = generate(model, [[1, 2, 3], [4, 4]], 5)
    assert all(77 not in tokens for tokens in clean)
    model.embedding.word_embeddings.weight.data[77] = torch.nan
    engine = Engine(StageRunner({0: model}), rows=2)
    found = list(engine.run([Request(each, 5) for each in ([1, 77], [1, 2, 3], [9, 9, 77, 9], [4, 4])]))
    assert [each.finish_reason for each in found] == ["error", "length", "error", "length"]
    assert "logits after token 2 are not finite" in str(found[0].error)
    assert [found[1].tokens, found[3].tokens] == clean


def test_an_error_in_one_text_ends_only_its_request() -> None:
    """The tokenizer fails for one prompt and for one generated text, and sampling fails for another request."""

    class Broken(Sampling):
        def next_tokens(self, logits: torch.Tensor, uniform: torch.Tensor, earlier: Any = ()) -> torch.Tensor:
            raise IndexError("index -1 is out of bounds")

    def detokenize(ids: Sequence[int]) -> str:
        if 77 in ids or (list(ids[:1]) == [9] and len(ids) > 1):
            raise ValueError("no text")
        return words(ids)

    model = model_of("llama")
    clean = generate(model, [[1, 2, 3], [4, 4]], 5)
    engine = Engine(StageRunner({0: model}), detokenize, rows=2)
    requests = [Request(each, 5) for each in ([77], [9], [1, 2, 3], [4, 4])]
    *failed, first, second, broken = engine.run([*requests, Request([3], 5, Broken())])
    assert [each.finish_reason for each in (*failed, broken)] == ["error"] * 3
    assert "cannot be continued: ValueError: no text" in str(failed[1].error)
    assert "IndexError: index -1 is out of bounds" in str(broken.error)
    assert [first.tokens, second.tokens] == clean and engine.idle
