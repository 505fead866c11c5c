"""Known differences between the results of Megatron-LM and of this program with the same flags. This module does not
import torch.

The texts are in megatron_differences.toml, in this folder. `--dry-run` and `tools/translate_flags.py` print the
differences that apply to the flags of a run. `tools/translate_flags.py --list` prints all differences."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.training.config.flags import named_value
from megatron.training.config.run_config import RunConfig

Given = Collection[str]
"""All flags that the user set, including flags without a configuration field. Each flag is included in the forms "FLAG"
and "FLAG VALUE", where VALUE is its first value."""


@dataclass(frozen=True)
class Difference:
    """Difference between the results of this program and the results of Megatron-LM."""

    subject: str
    here: str
    megatron: str
    page: str = ""
    """Name, without suffix, of the page in docs/ that describes the difference in detail."""

    def __str__(self) -> str:
        more = f" (docs/{self.page}.md)" if self.page else ""
        return f"{self.subject}: {self.here}{more}; Megatron-LM: {self.megatron}".replace("`", "")


TABLE = Path(__file__).with_suffix(".toml")
DIFFERENCES = tuple(Difference(**each) for each in tomllib.loads(TABLE.read_text(encoding="utf-8"))["difference"])


def differences_met(config: RunConfig, given: Given) -> Iterator[str]:
    """Yield a line for each known difference from Megatron-LM that applies to a run. `config` is the run's resolved
    configuration, and `given` contains the flags that the user set."""
    run = Run(config, given)
    return (str(each) for each in DIFFERENCES if MET[each.subject](run))


COMPRESSED = "dsv4_hybrid"
"""Name of the mixer with compressed attention."""

IGNORE_DOCUMENTS = {"mamba2", "gated_delta_net", "dsa", COMPRESSED}
"""Mixers that ignore --reset-attention-mask in Megatron-LM."""


class Run:
    """Properties of a run, which the conditions in `MET` read. Reading a property never raises an exception, even if
    the value of a flag is invalid."""

    def __init__(self, config: RunConfig, given: Given) -> None:
        self.config, self.given = config, given
        self.model, self.training = config.model, config.training
        self.parallel = config.parallel

    def value(self, field: str) -> Any:
        """Return the value of the flag with the name `field`, which an extension defines. Return None if the extension
        is not installed."""
        return named_value(self.config, field)

    def uses(self, optimizer: str) -> bool:
        return self.config.optimizer.optimizer == optimizer

    # Batches and tokens.

    @property
    def sums_over_tokens(self) -> bool:
        """True if Megatron-LM divides the loss by the number of tokens in the global batch, as this program does."""
        return "--calculate-per-token-loss" in self.given

    @property
    def masks_tokens(self) -> bool:
        """True if the main loss ignores some tokens."""
        return self.config.data.eod_mask_loss or self.model.loss_func == "goldfish"

    @property
    def separates_documents(self) -> bool:
        return self.config.data.reset_attention_mask

    @property
    def several_samples(self) -> bool:
        """True if a step has more than one sample."""
        return (self.training.global_batch_size or 1) > 1

    @property
    def several_samples_at_once(self) -> bool:
        """True if the data-parallel ranks, taken together, process more than one sample at the same time."""
        return self.training.micro_batch_size * (self.parallel.data_parallel_size or 1) > 1

    @property
    def several_micro_batches(self) -> bool:
        """True if a step has more than one micro-batch, counted over all data-parallel ranks."""
        return (self.training.global_batch_size or 1) > self.training.micro_batch_size

    @property
    def cuts_sequences(self) -> bool:
        """True if a rank holds only some tokens of a sequence."""
        return self.parallel.context_parallel_size > 1 or self.parallel.sequence_parallel

    @property
    def grows_batches(self) -> bool:
        """True if the batch size follows --step-batch-size-schedule."""
        return self.value("step_batch_size_schedule") is not None

    @property
    def validates_at_final_size(self) -> bool:
        """True if the run validates and no flag sets a separate global batch size for validation. Validation then uses
        the batch size of training. This batch size is ambiguous if the training batch size follows a schedule."""
        return bool(self.training.eval_iters) and self.training.eval_global_batch_size is None

    # Model

    @property
    def pads_vocabulary(self) -> bool:
        """True if Megatron-LM pads the vocabulary. If the vocabulary size is unknown, padding is assumed."""
        size, padded = self.model.vocab_size, self.model.pad_vocab_size_to
        multiple = self.model.make_vocab_size_divisible_by * self.parallel.tensor_model_parallel_size
        return size is None or (size % max(multiple, 1) > 0 if padded is None else padded != size)

    @property
    def predicts_several_tokens(self) -> bool:
        return self.model.mtp_depths > 0

    @property
    def has_latent_attention(self) -> bool:
        return self.model.attention == "multi_latent_attention"

    @property
    def mixers(self) -> set[str]:
        """Names of the mixers that the model's layers use instead of ordinary attention, such as linear attention. The
        set is empty if the layer pattern is invalid."""
        with suppress(ValueError, ArithmeticError, AssertionError):
            return set(self.model.linear_attentions)
        return set()

    @property
    def compresses(self) -> bool:
        """True if some layers have compressed attention."""
        return COMPRESSED in self.mixers

    @property
    def selects_keys(self) -> bool:
        """True if an indexer selects the keys that a query attends to. Sparse attention has an indexer, and compressed
        attention with a compression ratio of 4 has an indexer too."""
        ratios = str(self.value("csa_compress_ratios") or "").replace("*", " * ")
        return "dsa" in self.mixers or (self.compresses and re.search(r"\b4\b", ratios) is not None)

    @property
    def trains_indexer(self) -> bool:
        return self.selects_keys and (self.value("dsa_indexer_loss_coeff") or 0) > 0

    # Experts

    @property
    def has_experts(self) -> bool:
        return self.model.num_experts is not None

    @property
    def drops_tokens(self) -> bool:
        """True if tokens may be dropped because experts have a capacity."""
        return self.has_experts and self.model.moe_drops_tokens

    @property
    def hashes_tokens(self) -> bool:
        """True if some layers use hash routing."""
        return self.has_experts and (self.value("moe_n_hash_layers") or 0) > 0

    def balances(self, *losses: str) -> bool:
        """Return True if the model uses any of the load balancing losses `losses`."""
        return self.has_experts and self.model.moe_balancing_coeff(*losses) > 0


MET: dict[str, Callable[[Run], bool]] = {
    # Losses and batches
    "loss": lambda run: run.masks_tokens and run.several_micro_batches and not run.sums_over_tokens,
    "padded vocabulary": lambda run: run.pads_vocabulary,
    "`--rampup-batch-size`": lambda run: run.value("rampup_batch_size") is not None,
    "validation with `--step-batch-size-schedule`": lambda run: run.grows_batches and run.validates_at_final_size,
    "`--step-batch-size-schedule` with lengths in iterations": (
        lambda run: run.grows_batches and "--train-iters" in run.given
    ),
    "evaluations and saves with `--iterations-to-skip`": lambda run: bool(run.config.checks.iterations_to_skip),
    # Layers
    "multi-token prediction across documents and loss masks": (
        lambda run: run.predicts_several_tokens and (run.masks_tokens or run.separates_documents)
    ),
    "embedding dropout in multi-token prediction": (
        lambda run: run.predicts_several_tokens and run.model.hidden_dropout > 0
    ),
    "`--window-size` with `--reset-attention-mask`": (
        lambda run: run.model.window_size is not None and run.separates_documents
    ),
    "`--no-rope-freq` with `--multi-latent-attention`": (
        lambda run: run.model.no_rope_freq is not None and run.has_latent_attention
    ),
    "`--yarn-` flags with `--multi-latent-attention`": (
        lambda run: run.has_latent_attention and any(flag.startswith("--yarn-") for flag in run.given)
    ),
    "`--mscale-all-dim` with `--rope-type rope`": (
        lambda run: (
            run.model.attention_facts.scales_scores and run.model.rope_type == "rope" and run.model.mscale_all_dim != 0
        )
    ),
    "`--rope-scaling-factor`": lambda run: run.model.use_rope_scaling and run.model.rope_scaling_factor != 8,
    "`--qk-l2-norm`": (
        lambda run: run.model.qk_l2_norm and (run.model.no_rope_freq is not None or not run.model.rotary)
    ),
    "default width of a gated MLP": (
        lambda run: "ffn_hidden_size" in dict(run.config.given) and run.model.gated and not run.model.swiglu
    ),
    "`--openai-gelu`": (
        lambda run: (
            "--openai-gelu" in run.given and (not run.model.add_bias_linear or "--no-bias-gelu-fusion" in run.given)
        )
    ),
    "output norm of Mamba-2": lambda run: "mamba2" in run.mixers and run.model.norm_epsilon != 1e-5,
    "`--reset-attention-mask` in layers with Mamba-2, gated delta nets, sparse or compressed attention": (
        lambda run: run.separates_documents and not IGNORE_DOCUMENTS.isdisjoint(run.mixers)
    ),
    "hyper-connections": lambda run: bool(run.value("enable_mhc_connections")),
    # Experts
    "`global_aux_loss` of experts": lambda run: run.balances("global_aux_loss") and run.several_samples_at_once,
    "`aux_loss` of experts": lambda run: run.balances("aux_loss") and run.several_samples,
    "balancing losses with loss masks": (
        lambda run: (
            run.balances("aux_loss", "seq_aux_loss", "global_aux_loss") and run.masks_tokens and run.sums_over_tokens
        )
    ),
    "expert capacity (`--moe-expert-capacity-factor`)": (
        lambda run: run.drops_tokens and (run.training.micro_batch_size > 1 or run.cuts_sequences)
    ),
    "`--moe-token-drop-policy position`": (
        lambda run: run.drops_tokens and run.value("moe_token_drop_policy") == "position"
    ),
    "sinkhorn routing": (
        lambda run: bool(run.model.num_experts) and "sinkhorn" in run.model.moe_router_load_balancing_type
    ),
    "forced load balancing": (lambda run: bool(run.model.num_experts and run.value("moe_router_force_load_balancing"))),
    "hash routing table": lambda run: run.hashes_tokens,
    "weights of hash routing with `--moe-router-score-function softmax`": (
        lambda run: run.hashes_tokens and run.model.moe_router_scores == "softmax"
    ),
    "balancing losses with hash routing": (
        lambda run: run.hashes_tokens and run.balances("aux_loss", "seq_aux_loss", "global_aux_loss")
    ),
    # Differences of sparse attention and compressed attention
    "rotary embedding of the indexer of sparse attention": (
        lambda run: "dsa" in run.mixers and "--dsa-indexer-rope-interleaved" not in run.given
    ),
    "equal scores of an indexer": lambda run: run.selects_keys,
    "logged `indexer_loss`": lambda run: run.trains_indexer and run.value("dsa_indexer_loss_coeff") != 1,
    "indexer loss with loss masks": (lambda run: run.trains_indexer and run.masks_tokens and run.sums_over_tokens),
    "indexer loss of compressed attention": (
        lambda run: run.compresses and run.trains_indexer and run.several_micro_batches
    ),
    "attention sinks of compressed attention": lambda run: run.compresses and run.model.softmax_type != "learnable",
    # Optimizers
    "Muon and learned position embeddings": (
        lambda run: run.uses("muon") and run.model.position_embedding_type == "learned_absolute"
    ),
    "Muon and gated MLPs": lambda run: run.uses("muon") and run.model.gated and run.value("muon_split_gate_up"),
    "Muon and output projections of compressed attention": (
        lambda run: run.uses("muon") and run.compresses and (run.value("o_groups") or 1) > 1
    ),
    "`--optimizer lion`": lambda run: run.uses("lion"),
    "`--optimizer soap`": lambda run: run.uses("soap"),
    "`--embedding-init-method-std`": (
        lambda run: (
            run.model.embedding_init_method_std is not None and "embeddings" in run.config.optimizer.weight_decay_on
        )
    ),
    "`--use-mup`": lambda run: "--use-mup" in run.given,
}
"""Maps the subject of each known difference from Megatron-LM to a condition. The condition is a function that returns
True if the difference applies to a run."""
