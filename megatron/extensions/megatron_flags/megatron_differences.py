"""Known differences between the results of Megatron-LM and of this program under equal flags. No torch.

Their texts are in megatron_differences.toml, beside this file. `--dry-run` and `tools/translate_flags.py` print those
that apply to the given flags, `tools/translate_flags.py --list` all."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.training.config.flags import named_value
from megatron.training.config.foreign_flags import Given
from megatron.training.config.run_config import RunConfig


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
    """Whether a step has more micro-batches than one, on a rank or on several."""
    return (c.training.global_batch_size or 1) > c.training.micro_batch_size


def _masks_tokens(c: RunConfig) -> bool:
    """Whether some tokens do not count in the main loss."""
    return c.data.eod_mask_loss or c.model.loss_func == "goldfish"


def _balances(c: RunConfig, *types: str) -> bool:
    """Whether a loss of one of these types balances experts."""
    return c.model.num_experts is not None and c.model.moe_balancing_coeff(*types) > 0


def _samples_at_once(c: RunConfig) -> int:
    """Samples of a micro-batch on all ranks."""
    return c.training.micro_batch_size * (c.parallel.data_parallel_size or 1)


def _pads_vocabulary(c: RunConfig) -> bool:
    """Whether Megatron-LM pads the vocabulary, as it does almost any that is not known yet."""
    size, padded = c.model.vocab_size, c.model.pad_vocab_size_to
    multiple = c.model.make_vocab_size_divisible_by * c.parallel.tensor_model_parallel_size
    return size is None or (size % max(multiple, 1) > 0 if padded is None else padded != size)


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
}
"""Subject of a difference -> whether it applies to a resolved configuration. Like a rule, it must not raise on any
value."""
