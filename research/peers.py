"""Models of other programs for research/speed.py. Each model is built with the public classes of its program, as a user
would build it.

Each builder takes a style and a dtype, and returns the model and its loss function, `loss(run, tokens, labels)`. Tokens
and labels have the shape [b, s]. `run` is the model, or the model after torch.compile. `pip install -r
research/requirements.txt` installs the programs; use a separate environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from tools.bench.side_by_side import forget
from tools.bench.styles import Style


def build_peer(name: str, style: Style, dtype: str) -> tuple[Any, Callable[..., Any]]:
    """Build the model of another program. Return the model in training mode, and its loss function.

    Raises ValueError if the model does not have `style.parameters` parameters.
    """
    import torch

    kind = getattr(torch, dtype)
    model, loss_of = PEERS[name](style, kind)
    found = sum(parameter.numel() for parameter in model.parameters())
    if style.llama and found != style.parameters:
        raise ValueError(f"{name}'s model has {found} parameters, not {style.parameters}")
    # `Module.to` would convert the complex rotary tables of torchtitan to real tensors.
    tables = [(part, key, x) for part in model.modules() for key, x in part.named_buffers(recurse=False)]
    model = model.to(kind).train()
    for part, key, x in tables:
        if x.is_complex():
            setattr(part, key, x)
    return model, loss_of


def transformers_model(style: Style, dtype: Any) -> tuple[Any, Callable[..., Any]]:
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


def litgpt_model(style: Style, dtype: Any) -> tuple[Any, Callable[..., Any]]:
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


def torchtitan_model(style: Style, dtype: Any) -> tuple[Any, Callable[..., Any]]:
    import torch
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    # torchtitan computes the MLP width as 8/3 of the hidden size, rounded up to a multiple of `multiple_of`.
    assert 8 * style.hidden // 3 <= style.ffn < 2 * (8 * style.hidden // 3)
    model = Transformer(
        TransformerModelArgs(
            dim=style.hidden,
            n_layers=style.layers,
            n_heads=style.heads,
            n_kv_heads=style.groups,
            vocab_size=style.vocab,
            multiple_of=style.ffn,
            max_seq_len=style.seq,
        )
    )
    with torch.no_grad():
        model.init_weights()
    return model, lambda run, tokens, labels: cross_entropy(run(tokens), labels)


def megatron_core_model(style: Style, dtype: Any) -> tuple[Any, Callable[..., Any]]:
    """Return megatron-core's GPTModel with its own layers, without Transformer Engine and Apex, which need a GPU."""
    forget("megatron")
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    # On a CPU, a step of megatron-core would use a GPU only for rotary tables, masks, and the random state of attention
    # dropout. Dropout is 0 here.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo")
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # type: ignore[import-not-found]
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker  # type: ignore[import-not-found]
    from megatron.core.transformer.transformer_config import TransformerConfig  # type: ignore[import-not-found]

    from megatron.core import parallel_state  # type: ignore[attr-defined]
    from megatron.core.models.gpt import GPTModel  # type: ignore[attr-defined]

    parallel_state.initialize_model_parallel()
    get_cuda_rng_tracker().fork = lambda *names: nullcontext()
    of_style: dict[str, Any] = {}
    if style.llama:
        of_style = {"gated_linear_unit": True, "activation_func": F.silu, "normalization": "RMSNorm"}
    config = TransformerConfig(
        num_layers=style.layers,
        hidden_size=style.hidden,
        num_attention_heads=style.heads,
        num_query_groups=style.groups,
        ffn_hidden_size=style.ffn,
        add_bias_linear=not style.llama,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **of_style,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=of_style.get("normalization")),
        vocab_size=style.vocab,
        max_sequence_length=style.seq,
        position_embedding_type="rope" if style.llama else "learned_absolute",
        share_embeddings_and_output_weights=not style.llama,
    )
    positions = torch.arange(style.seq).expand(style.micro_batch, -1)
    hidden = torch.ones(1, 1, style.seq, style.seq, dtype=torch.bool).triu(1)
    return model, lambda run, tokens, labels: run(tokens, positions, hidden, labels=labels).mean()


PEERS: dict[str, Callable[[Style, Any], tuple[Any, Callable[..., Any]]]] = {
    "transformers": transformers_model,
    "litgpt": litgpt_model,
    "torchtitan": torchtitan_model,
    "megatron-core": megatron_core_model,
}
ONLY_LLAMA = ("litgpt", "torchtitan")


def cross_entropy(logits: Any, labels: Any) -> Any:
    import torch.nn.functional as F

    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
