"""What a configuration leaves open and follows from the rest of it."""

from __future__ import annotations

import pytest

from megatron.core.config.model import TransformerConfig
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import MOCK_VOCAB_SIZE, resolve, validate
from tests.pure.test_validation import argv


def test_resolve_fills_what_follows() -> None:
    config = resolve(parse_args(argv("--tp 2 --micro-batch-size 2 --swiglu")), 8)
    assert config.parallel.data_parallel_size == 4
    assert (config.training.global_batch_size, config.training.num_microbatches) == (8, 1)
    model = config.model
    assert (model.kv_channels, model.ffn_hidden_size, model.max_position_embeddings) == (4, 128, 16)
    assert model.vocab_size == MOCK_VOCAB_SIZE
    assert resolve(config, 8) == config
    assert resolve(parse_args(argv("--num-microbatches 3")), 2).training.global_batch_size == 6


@pytest.mark.parametrize(
    ("hidden_size", "width"), [(8, 64), (24, 64), (47, 64), (48, 128), (1024, 2688), (4096, 10880), (5120, 13632)]
)
def test_default_width_of_a_gated_mlp_is_rounded_down(hidden_size: int, width: int) -> None:
    """Megatron-LM's widths, except that a model too small for any multiple of 64 gets 64."""
    assert TransformerConfig(hidden_size=hidden_size, swiglu=True).ffn_size == width
    assert TransformerConfig(hidden_size=hidden_size).ffn_size == 4 * hidden_size


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("", "gelu_tanh"),
        ("--disable-bias-linear", "gelu"),
        ("--no-bias-gelu-fusion", "gelu"),
        ("--no-bias-gelu-fusion --activation-func gelu_tanh", "gelu_tanh"),
        ("--activation-func gelu", "gelu"),
        ("--swiglu", "swiglu"),
        ("--squared-relu --no-bias-gelu-fusion", "squared_relu"),
    ],
)
def test_gelu_is_exact_without_the_fused_kernel_of_bias_and_gelu(flags: str, name: str) -> None:
    config = parse_args(argv(flags))
    resolved = resolve(config, 1)
    assert config.model.activation == resolved.model.activation == name
    assert resolved.model.activation_func == (name if "gelu" in name else None)  # checkpoints say which GeLU it was
    assert not validate(resolved, 1) and resolve(resolved, 1) == resolved


def test_resolve_takes_the_larger_vocabulary() -> None:
    """Of the tokenizer's and --vocab-size, which may leave room for more tokens."""
    flags = argv("--tokenizer-type ByteTokenizer --vocab-size 100")
    assert resolve(parse_args(flags), 1, vocab_size=101).model.vocab_size == 101
    assert resolve(parse_args(flags), 1, vocab_size=99).model.vocab_size == 100
    assert resolve(parse_args(argv("")), 1, vocab_size=259).model.vocab_size == 259
