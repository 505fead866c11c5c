"""The models that speed.py compares with: those of other programs, as their users build them.

Each builder takes a style, and returns the model and its loss, `loss(run, tokens, labels)` of tokens and
labels [b, s], in which `run` is the model or a compiled one. `pip install -r tools/bench/requirements.txt`, in an
environment of its own, has the packages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Style:
    """A model that all contestants can build."""

    layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    seq: int
    vocab: int
    micro_batch: int
    llama: bool

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.seq * self.micro_batch

    @property
    def products(self) -> list[tuple[int, int]]:
        """(in, out) of each matrix that activations are multiplied with."""
        head_dim = self.hidden // self.heads
        qkv = (self.heads + 2 * self.groups) * head_dim
        layer = [
            (self.hidden, qkv),
            (self.hidden, self.hidden),
            (self.hidden, self.ffn * (2 if self.llama else 1)),
            (self.ffn, self.hidden),
        ]
        return layer * self.layers + [(self.hidden, self.vocab)]

    @property
    def parameters(self) -> int:
        """Of the Llama: matrices, the embedding, and norms."""
        matrices = sum(size_in * size_out for size_in, size_out in self.products)
        return matrices + self.hidden * (self.vocab + 2 * self.layers + 1)


STYLES = {
    "gpt": Style(6, 384, 6, 6, 4 * 384, 256, 50304, 4, llama=False),
    "llama": Style(6, 384, 6, 2, 1024, 512, 32000, 2, llama=True),
}


def build_peer(name: str, style: Style, dtype: str) -> tuple[Any, Callable[..., Any]]:
    """The model of a package in training, and its loss. ValueError if it is not the model of the style."""
    import torch

    kind = getattr(torch, dtype)
    model, loss_of = PEERS[name](style)
    found = sum(parameter.numel() for parameter in model.parameters())
    if style.llama and found != style.parameters:
        raise ValueError(f"{name}'s model has {found} parameters, not {style.parameters}")
    model = model.to(kind).train()
    return model, loss_of


def transformers_model(style: Style) -> tuple[Any, Callable[..., Any]]:
    import transformers

    if style.llama:
        config = transformers.LlamaConfig(
            hidden_size=style.hidden,
            intermediate_size=style.ffn,
            num_hidden_layers=style.layers,
            num_attention_heads=style.heads,
            num_key_value_heads=style.groups,
            vocab_size=style.vocab,
            max_position_embeddings=style.seq,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
            use_cache=False,
        )
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(
            n_embd=style.hidden,
            n_layer=style.layers,
            n_head=style.heads,
            n_positions=style.seq,
            vocab_size=style.vocab,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            attn_implementation="sdpa",
            use_cache=False,
        )
        model = transformers.GPT2LMHeadModel(config)
    return model, lambda run, tokens, labels: cross_entropy(run(input_ids=tokens).logits, labels)


def litgpt_model(style: Style) -> tuple[Any, Callable[..., Any]]:
    import litgpt

    config = litgpt.Config(
        block_size=style.seq,
        vocab_size=style.vocab,
        padded_vocab_size=style.vocab,
        n_layer=style.layers,
        n_head=style.heads,
        n_embd=style.hidden,
        n_query_groups=style.groups,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=style.ffn,
    )
    return litgpt.GPT(config), lambda run, tokens, labels: cross_entropy(run(tokens), labels)


PEERS: dict[str, Callable[[Style], tuple[Any, Callable[..., Any]]]] = {
    "transformers": transformers_model,
    "litgpt": litgpt_model,
}


def cross_entropy(logits: Any, labels: Any) -> Any:
    import torch.nn.functional as F

    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
