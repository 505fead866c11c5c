"""Known differences between the results of Megatron-LM and of this program under equal flags. No torch.

Their texts are in megatron_differences.toml, beside this file. `--dry-run` and `tools/translate_flags.py` print those
that apply to the given flags, `tools/translate_flags.py --list` all."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron.training.config.flags import named_value
from megatron.training.config.run_config import RunConfig

Given = Collection[str]
"""Every flag as it was given, alone and with its first value: also those that no field has."""


@dataclass(frozen=True)
class Difference:
    """A result that differs from Megatron-LM's."""

    subject: str
    here: str
    megatron: str
    page: str = ""
    """The page of docs/ that says more, without its suffix."""

    def __str__(self) -> str:
        more = f" (docs/{self.page}.md)" if self.page else ""
        return f"{self.subject}: {self.here}{more}; Megatron-LM: {self.megatron}".replace("`", "")


TABLE = Path(__file__).with_suffix(".toml")
DIFFERENCES = tuple(Difference(**each) for each in tomllib.loads(TABLE.read_text(encoding="utf-8"))["difference"])


def differences_met(config: RunConfig, given: Given) -> Iterator[str]:
    """A line for each difference that applies to a resolved configuration and the flags as given."""
    return (str(each) for each in DIFFERENCES if MET[each.subject](config, given))


def _per_token(given: Given) -> bool:
    return "--calculate-per-token-loss" in given


def _several_micro_batches(c: RunConfig) -> bool:
    """Return whether a step has more micro-batches than one, on a rank or on several."""
    return (c.training.global_batch_size or 1) > c.training.micro_batch_size


def _masks_tokens(c: RunConfig) -> bool:
    """Return whether some tokens do not count in the main loss."""
    return c.data.eod_mask_loss or c.model.loss_func == "goldfish"


def _balances(c: RunConfig, *types: str) -> bool:
    """Return whether a loss of one of these types balances experts."""
    return c.model.num_experts is not None and c.model.moe_balancing_coeff(*types) > 0


def _samples_at_once(c: RunConfig) -> int:
    """Samples of a micro-batch on all ranks."""
    return c.training.micro_batch_size * (c.parallel.data_parallel_size or 1)


def _pads_vocabulary(c: RunConfig) -> bool:
    """Return whether Megatron-LM pads the vocabulary, as it does almost any that is not known yet."""
    size, padded = c.model.vocab_size, c.model.pad_vocab_size_to
    multiple = c.model.make_vocab_size_divisible_by * c.parallel.tensor_model_parallel_size
    return size is None or (size % max(multiple, 1) > 0 if padded is None else padded != size)


def _mixers(c: RunConfig) -> set[str]:
    """Linear attentions and other mixers of the layers; none where the pattern of layers is not legal."""
    with suppress(ValueError, ArithmeticError, AssertionError):
        return set(c.model.linear_attentions)
    return set()


def _ratios(c: RunConfig) -> str:
    return str(named_value(c, "csa_compress_ratios") or "")


def _selects(c: RunConfig) -> bool:
    """Whether an indexer selects keys: of sparse attention, or in layers of compressed attention with a ratio of 4."""
    mixers = _mixers(c)
    return "dsa" in mixers or (COMPRESSED in mixers and re.search(r"\b4\b", _ratios(c).replace("*", " * ")) is not None)


def _learns_selection(c: RunConfig) -> bool:
    return _selects(c) and (named_value(c, "dsa_indexer_loss_coeff") or 0) > 0


def _hashes(c: RunConfig) -> bool:
    """Return whether some layers have routing by hashes."""
    return c.model.num_experts is not None and (named_value(c, "moe_n_hash_layers") or 0) > 0


COMPRESSED = "dsv4_hybrid"
WITHOUT_DOCUMENTS = {"mamba2", "gated_delta_net", "dsa", COMPRESSED}
"""Mixers that ignore --reset-attention-mask in Megatron-LM."""


MET: dict[str, Callable[[RunConfig, Given], bool]] = {
    "loss": lambda c, given: _masks_tokens(c) and _several_micro_batches(c) and not _per_token(given),
    "padded vocabulary": lambda c, given: _pads_vocabulary(c),
    "multi-token prediction across documents and loss masks": lambda c, given: (
        c.model.mtp_depths > 0 and (_masks_tokens(c) or c.data.reset_attention_mask)
    ),
    "`--window-size` with `--reset-attention-mask`": lambda c, given: (
        c.model.window_size is not None and c.data.reset_attention_mask
    ),
    "`--no-rope-freq` with `--multi-latent-attention`": lambda c, given: (
        c.model.no_rope_freq is not None and c.model.attention == "multi_latent_attention"
    ),
    "`--mscale-all-dim` with `--rope-type rope`": lambda c, given: (
        c.model.attention_facts.scales_scores and c.model.rope_type == "rope" and c.model.mscale_all_dim != 0
    ),
    "`global_aux_loss` of experts": lambda c, given: _balances(c, "global_aux_loss") and _samples_at_once(c) > 1,
    "`aux_loss` of experts": lambda c, given: _balances(c, "aux_loss") and (c.training.global_batch_size or 1) > 1,
    "balancing losses under loss masks": lambda c, given: (
        _balances(c, "aux_loss", "seq_aux_loss", "global_aux_loss") and _masks_tokens(c) and _per_token(given)
    ),
    "capacity of experts (`--moe-expert-capacity-factor`)": lambda c, given: (
        c.model.num_experts is not None
        and c.model.moe_drops_tokens
        and (c.training.micro_batch_size > 1 or c.parallel.context_parallel_size > 1 or c.parallel.sequence_parallel)
    ),
    "multi-token prediction, dropout of the embedding": lambda c, given: (
        c.model.mtp_depths > 0 and c.model.hidden_dropout > 0
    ),
    "sinkhorn routing": lambda c, given: (
        bool(c.model.num_experts) and "sinkhorn" in c.model.moe_router_load_balancing_type
    ),
    "forced load balancing": lambda c, given: bool(
        c.model.num_experts and named_value(c, "moe_router_force_load_balancing")
    ),
    "`--qk-l2-norm`": lambda c, given: c.model.qk_l2_norm and (c.model.no_rope_freq is not None or not c.model.rotary),
    "default width of a gated MLP": lambda c, given: (
        "ffn_hidden_size" in dict(c.given) and c.model.gated and not c.model.swiglu
    ),
    "Muon, learned position embeddings": lambda c, given: (
        c.optimizer.optimizer == "muon" and c.model.position_embedding_type == "learned_absolute"
    ),
    "Muon, gated MLPs": lambda c, given: (
        c.optimizer.optimizer == "muon" and c.model.gated and named_value(c, "muon_split_gate_up")
    ),
    "`--rope-scaling-factor`": lambda c, given: c.model.use_rope_scaling and c.model.rope_scaling_factor != 8,
    "`--openai-gelu`": lambda c, given: (
        "--openai-gelu" in given and (not c.model.add_bias_linear or "--no-bias-gelu-fusion" in given)
    ),
    "`--rampup-batch-size`": lambda c, given: named_value(c, "rampup_batch_size") is not None,
    "`--step-batch-size-schedule`, validation": lambda c, given: (
        named_value(c, "step_batch_size_schedule") is not None
        and bool(c.training.eval_iters)
        and c.training.eval_global_batch_size is None
    ),
    "`--embedding-init-method-std`": lambda c, given: (
        c.model.embedding_init_method_std is not None and "embeddings" in c.optimizer.weight_decay_on
    ),
    "`--optimizer lion`": lambda c, given: c.optimizer.optimizer == "lion",
    "`--step-batch-size-schedule` with lengths in iterations": lambda c, given: (
        named_value(c, "step_batch_size_schedule") is not None and "--train-iters" in given
    ),
    "Mamba-2, norm of the outputs": lambda c, given: "mamba2" in _mixers(c) and c.model.norm_epsilon != 1e-5,
    "`--reset-attention-mask` in layers with Mamba-2, gated delta nets, sparse or compressed attention": (
        lambda c, given: c.data.reset_attention_mask and not WITHOUT_DOCUMENTS.isdisjoint(_mixers(c))
    ),
    "rotary embedding of the indexer of sparse attention": lambda c, given: (
        "dsa" in _mixers(c) and "--dsa-indexer-rope-interleaved" not in given
    ),
    "equal scores of an indexer": lambda c, given: _selects(c),
    "logged `indexer_loss`": lambda c, given: _learns_selection(c) and named_value(c, "dsa_indexer_loss_coeff") != 1,
    "indexer's loss under loss masks": lambda c, given: _learns_selection(c) and _masks_tokens(c) and _per_token(given),
    "indexer's loss of compressed attention": lambda c, given: (
        COMPRESSED in _mixers(c) and _learns_selection(c) and _several_micro_batches(c)
    ),
    "sinks of compressed attention": lambda c, given: COMPRESSED in _mixers(c) and c.model.softmax_type != "learnable",
    "Muon, outputs of compressed attention": lambda c, given: (
        c.optimizer.optimizer == "muon" and COMPRESSED in _mixers(c) and (named_value(c, "o_groups") or 1) > 1
    ),
    "hyper-connections": lambda c, given: bool(named_value(c, "enable_mhc_connections")),
    "weights of hash routing with `--moe-router-score-function softmax`": lambda c, given: (
        _hashes(c) and c.model.moe_router_scores == "softmax"
    ),
    "balancing losses of hash routing": lambda c, given: (
        _hashes(c) and _balances(c, "aux_loss", "seq_aux_loss", "global_aux_loss")
    ),
    "table of hash routing": lambda c, given: _hashes(c),
    "`--yarn-` flags with `--multi-latent-attention`": lambda c, given: (
        c.model.attention == "multi_latent_attention" and any(flag.startswith("--yarn-") for flag in given)
    ),
    "`--iterations-to-skip`, evaluations and saves": lambda c, given: bool(c.checks.iterations_to_skip),
    "`--moe-token-drop-policy position`": lambda c, given: (
        c.model.num_experts is not None
        and c.model.moe_drops_tokens
        and named_value(c, "moe_token_drop_policy") == "position"
    ),
    "`--use-mup`": lambda c, given: "--use-mup" in given,
}
"""Subject of a difference -> whether it applies to a resolved configuration. Like a rule, it must not raise on any
value."""
