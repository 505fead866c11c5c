"""Known differences between the results of Megatron-LM and of this program under equal flags. No torch.

`--dry-run` and `tools/translate_flags.py` print those that the given flags meet, `tools/translate_flags.py --list` all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron.training.config.flags import named_value
from megatron.training.config.foreign_flags import Given
from megatron.training.config.run_config import RunConfig


@dataclass(frozen=True)
class Difference:
    """A result that differs from Megatron-LM's."""

    subject: str
    here: str
    megatron: str
    met: Callable[[RunConfig, Given], bool]
    """Whether a resolved configuration meets it. Like a rule, it must not raise on any values."""

    page: str = ""
    """The page of docs/ that says more, without its suffix."""

    def __str__(self) -> str:
        more = f" (docs/{self.page}.md)" if self.page else ""
        return f"{self.subject}: {self.here}{more}; Megatron-LM: {self.megatron}".replace("`", "")


def differences_met(config: RunConfig, given: Given) -> Iterator[str]:
    """A line for each difference that a resolved configuration and the flags as given meet."""
    return (str(each) for each in DIFFERENCES if each.met(config, given))


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


DIFFERENCES = (
    Difference(
        "loss",
        "sum over tokens, divided once by the valid tokens of the global batch, as with `--calculate-per-token-loss`; "
        "both agree if all tokens count",
        "by default a mean of means over micro-batches and ranks",
        lambda c, given: _masks_tokens(c) and _several_micro_batches(c) and not _per_token(given),
    ),
    Difference(
        "padded vocabulary",
        "outside the softmax: the loss does not depend on the padding",
        "takes part in the softmax",
        lambda c, given: _pads_vocabulary(c),
    ),
    Difference(
        "multi-token prediction across documents and loss masks",
        "a label counts if those of all tokens before it, from the token that predicts it, count, and if it is in that "
        "token's document; at depth k all have the factor s / (s - k)",
        "shifts the loss mask: `--eod-mask-loss` masks the token behind the end of a document, and not those after it; "
        "each depth is a mean over its own tokens of a micro-batch on a rank",
        lambda c, given: c.model.mtp_depths > 0 and (_masks_tokens(c) or c.data.reset_attention_mask),
        page="multi_token_prediction",
    ),
    Difference(
        "`--window-size` with `--reset-attention-mask`",
        "attention sees neither beyond its window nor beyond its document",
        "without Transformer Engine the window replaces the mask of documents",
        lambda c, given: c.model.window_size is not None and c.data.reset_attention_mask,
    ),
    Difference(
        "`--no-rope-freq` with `--multi-latent-attention`",
        "layers without rotary embedding have none",
        "never read: every layer rotates",
        lambda c, given: c.model.no_rope_freq is not None and c.model.attention == "multi_latent_attention",
    ),
    Difference(
        "`--mscale-all-dim` with `--rope-type rope`",
        "no effect: it is a setting of YaRN",
        "attention scores are scaled as under YaRN, by `--rotary-scaling-factor` and this",
        lambda c, given: (
            c.model.attention_facts.scales_scores and c.model.rope_type == "rope" and c.model.mscale_all_dim != 0
        ),
    ),
    Difference(
        "`global_aux_loss` of experts",
        "loads are a running mean over the samples of the step; no layout or micro-batch size changes it. Equal to "
        "Megatron-LM's if a micro-batch of all ranks has one sample",
        "a running mean over the micro-batches of the step",
        lambda c, given: _balances(c, "global_aux_loss") and _samples_at_once(c) > 1,
        page="mixture_of_experts",
    ),
    Difference(
        "`aux_loss` of experts",
        "the same as `global_aux_loss`",
        "loads of one micro-batch of one rank; with one sample in it, use `seq_aux_loss` here",
        lambda c, given: _balances(c, "aux_loss") and (c.training.global_batch_size or 1) > 1,
    ),
    Difference(
        "balancing losses under loss masks",
        "means over all tokens of the global batch",
        "with `--calculate-per-token-loss` larger by the ratio of all tokens to valid ones",
        lambda c, given: (
            _balances(c, "aux_loss", "seq_aux_loss", "global_aux_loss") and _masks_tokens(c) and _per_token(given)
        ),
    ),
    Difference(
        "capacity of experts (`--moe-expert-capacity-factor`)",
        "counted in each sequence",
        "counted in the tokens of a micro-batch on a rank",
        lambda c, given: (
            c.model.num_experts is not None
            and c.model.moe_drops_tokens
            and (
                c.training.micro_batch_size > 1 or c.parallel.context_parallel_size > 1 or c.parallel.sequence_parallel
            )
        ),
    ),
    Difference(
        "multi-token prediction, dropout of the embedding",
        "masks of its own at each depth",
        "drawn anew",
        lambda c, given: c.model.mtp_depths > 0 and c.model.hidden_dropout > 0,
    ),
    Difference(
        "sinkhorn routing",
        "scales the logits of each sequence together, with a fixed number of iterations; can be combined with capacity "
        "and `--moe-router-topk-scaling-factor`",
        "scales those of all tokens of a rank's micro-batch until changes fall below a tolerance, so its choice "
        "depends on layout and micro-batch size",
        lambda c, given: bool(c.model.num_experts) and c.model.moe_sinkhorn,
    ),
    Difference(
        "forced load balancing",
        "random logits by sample and position, in training only",
        "drawn on each rank, in evaluation too",
        lambda c, given: bool(c.model.num_experts) and c.model.moe_router_force_load_balancing,
    ),
    Difference(
        "`--qk-l2-norm`",
        "in layers with rotary embedding",
        "in all layers",
        lambda c, given: c.model.qk_l2_norm and (c.model.no_rope_freq is not None or not c.model.rotary),
    ),
    Difference(
        "default width of a gated MLP",
        "8h/3 rounded down to a multiple of 64, but at least 64, for every gated activation function",
        "rounded down, 0 below h = 24; for `--swiglu` only",
        lambda c, given: "ffn_hidden_size" in dict(c.given) and c.model.gated and not c.model.swiglu,
    ),
    Difference(
        "Muon, learned position embeddings",
        "belong to `--muon-scalar-optimizer`",
        "orthogonalized as the matrix of a hidden layer",
        lambda c, given: c.optimizer.optimizer == "muon" and c.model.position_embedding_type == "learned_absolute",
        page="optimizers",
    ),
    Difference(
        "Muon, gated MLPs",
        "orthogonalizes gate and up apart, unless `--muon-no-split-gate-up` is given",
        "orthogonalizes them as one matrix",
        lambda c, given: c.optimizer.optimizer == "muon" and c.model.gated and named_value(c, "muon_split_gate_up"),
        page="optimizers",
    ),
    Difference(
        "`--rope-scaling-factor`",
        "divides the low frequencies",
        "never read: the divisor is 8",
        lambda c, given: c.model.use_rope_scaling and c.model.rope_scaling_factor != 8,
    ),
    Difference(
        "`--openai-gelu`",
        "`--activation-func gelu_tanh`",
        "never read: GeLU is erf without biases or with `--no-bias-gelu-fusion`",
        lambda c, given: "--openai-gelu" in given and (not c.model.add_bias_linear or "--no-bias-gelu-fusion" in given),
    ),
    Difference(
        "`--rampup-batch-size`",
        "raises the batch size",
        "deprecated: the newest version ignores it, so that every step has `--global-batch-size`",
        lambda c, given: c.training.rampup_batch_size is not None,
    ),
    Difference(
        "`--step-batch-size-schedule`, validation",
        "batches of the last size, or of `--eval-global-batch-size`",
        "batches of micro-batch size x data-parallel size: the layout decides which samples are evaluated",
        lambda c, given: (
            c.training.step_batch_size_schedule is not None
            and bool(c.training.eval_iters)
            and c.training.eval_global_batch_size is None
        ),
    ),
    Difference(
        "`--embedding-init-method-std`",
        "embeddings decay as others do; `--weight-decay-on matrices` leaves them out",
        "the same, but versions up to core 0.15 left embeddings out of weight decay",
        lambda c, given: c.model.embedding_init_method_std is not None and "embeddings" in c.optimizer.weight_decay_on,
    ),
    Difference(
        "`--optimizer lion`",
        "Lion for all parameters, with `--lion-beta1` and `--lion-beta2`",
        "Lion with Adam's betas for the matrices of hidden layers, Adam for all others",
        lambda c, given: c.optimizer.optimizer == "lion",
        page="optimizers",
    ),
    Difference(
        "`--step-batch-size-schedule` with lengths in iterations",
        "they become the samples of as many iterations of the schedule",
        "data and learning rate are sized for batches of micro-batch size x data-parallel size, and end early",
        lambda c, given: c.training.step_batch_size_schedule is not None and "--train-iters" in given,
    ),
)
