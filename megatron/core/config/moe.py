"""Mixture of experts: the registry of routers, and configuration fields that `TransformerConfig` inherits. This module
does not import torch.

@ROUTERS.register("my_router", when=lambda config, number: config.options(MyFlags).my_router)
class MyRouter(TopKRouter):
    def ranked(self, logits: Tensor, context: BatchContext) -> Tensor: ...
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from megatron.core.config.flag_spec import Condition, Section, flag
from megatron.core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class RouterFacts:
    """Properties of a router. The functions among the fields receive the model's configuration as argument."""

    when: Callable[..., bool] = lambda config, number: True
    """Predicate of (configuration, layer number) that decides whether the router applies to the layer. If several
    routers apply, the layer uses the router that was registered last."""

    scores: tuple[str, ...] = ()
    """Values of --moe-router-score-function that the router defines. The method `make_scores` of this router creates
    the scores for these values, even if the model uses another router."""

    losses: tuple[str, ...] = ()
    """Values of --moe-router-load-balancing-type that select an auxiliary loss. A run may combine several of these
    losses."""

    balancings: tuple[str, ...] = ()
    """Values of --moe-router-load-balancing-type that this router supports, and that cannot be combined with other
    values."""

    fixed_scores: Callable[..., str | None] = lambda config: None
    """Function that returns the kind of scores (`MoEConfig.moe_router_scores`) that the router always uses; None if
    --moe-router-score-function determines the kind."""

    training_only: bool = False
    """True if the router is used only in training. In evaluation and generation, the layer uses the router that was
    registered before this one, so that the outputs of a trained model do not depend on this router."""


class Scores(Protocol):
    """Functions that compute the scores and weights of experts from a router's logits [..., E]."""

    def ranked(self, logits: Tensor) -> Tensor:
        """Return the scores [..., E] that rank the experts: the k experts with the largest scores are chosen."""

    def summed(self, logits: Tensor) -> Tensor:
        """Return the expert scores [..., E] that are summed over a group of experts to obtain the score of the
        group."""

    def weights(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """Return the weights [..., k] of the experts `chosen` [..., k]."""

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return probabilities [..., E], which sum to 1, for the balancing losses."""

    def positive(self, logits: Tensor) -> Tensor:
        """Return the scores [..., E] to which the expert bias is added."""


class RouterModule(Protocol):
    """The `nn.Module` that chooses experts for one layer's tokens."""

    def forward(self, x: Tensor, context: object, /) -> object:
        """Choose experts for the tokens x [s, b, h], or [s/tp, b, h] under sequence parallelism. The method returns a
        `megatron.core.moe.router.Choice`. `context` is the micro-batch's `megatron.core.batch.BatchContext`."""


class RouterClass(Protocol):
    """Interface of a router class, such as a subclass of `megatron.core.moe.router.TopKRouter`."""

    def __call__(self, name: str, config: Section, ctx: object) -> nn.Module:
        """Create the router. `name` is the prefix of the parameter names, `config` is the layer's `TransformerConfig`,
        and `ctx` is the layer's `megatron.core.tensor_parallel.layers.TPContext`."""

    def make_scores(self, config: Section) -> Scores:
        """Create the `Scores` with the name `config.moe_router_scores`, which is one of `RouterFacts.scores` of this
        router. This method must be static."""


ROUTERS = Registry("router", RouterFacts, protocol=RouterClass, makes=RouterModule)
"""Registry that maps the name of each router to a `RouterClass`."""

ROUTERS.register(
    "top_k",
    "megatron.core.moe.router:TopKRouter",
    scores=("softmax", "sigmoid", "sqrtsoftplus"),
    losses=("aux_loss", "seq_aux_loss", "global_aux_loss"),
    balancings=("none",),
)


def router_of(config: Section, number: int, in_training: bool = True) -> str:
    """Return the name of the router that layer `number` uses. If `in_training` is False, routers that are used only in
    training are ignored."""
    wanted = ROUTERS.wanted(config, number)
    return [name for name in wanted if in_training or not ROUTERS.facts(name).training_only][-1]


@dataclass(frozen=True)
class RouterValues(Collection[str]):
    """All values of a flag that the registered routers support. The function `stated` returns the values that one
    router supports, given its `RouterFacts`."""

    stated: Callable[[RouterFacts], tuple[str, ...]]

    def __iter__(self) -> Iterator[str]:
        return (value for name in ROUTERS for value in self.stated(ROUTERS.facts(name)))

    def __contains__(self, value: object) -> bool:
        return any(value == each for each in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def router(self, value: str) -> str:
        """Return the name of the router that is registered for the choice `value`. The method raises ValueError unless
        exactly one router is registered for `value`."""
        stating = [name for name in ROUTERS if value in self.stated(ROUTERS.facts(name))]
        if len(stating) != 1:
            raise ValueError(
                f"{value} must be listed by exactly one router, but is listed by {' and '.join(stating) or 'none'}"
            )
        return stating[0]

    def where(self, value: str) -> str:
        """Return the file and line at which the router for the choice `value` is registered."""
        return ROUTERS.where(self.router(value))


SCORE_FUNCTIONS = RouterValues(lambda facts: facts.scores)
"""Choices of --moe-router-score-function."""

BALANCING_LOSSES = RouterValues(lambda facts: facts.losses)
"""Choices of --moe-router-load-balancing-type that can be combined with each other."""

BALANCINGS = RouterValues(lambda facts: (*facts.losses, *facts.balancings))
"""Choices of --moe-router-load-balancing-type."""

CAPACITY = Condition("--moe-expert-capacity-factor", lambda config: config.model.moe_drops_tokens)
OWN_SCORES = "--moe-router-score-function sigmoid or --moe-router-score-function sqrtsoftplus"
GROUPS = "--moe-router-num-groups; add --moe-router-num-groups, for example the number of nodes that hold the experts"


@dataclass(frozen=True)
class MoEConfig:
    """Configuration of experts, router and token dispatch. If `num_experts` is not set, the model is dense."""

    NO_EFFECT_WITHOUT: ClassVar = "--num-experts"

    num_experts: int | None = flag(None, first_run=True)
    """Number of experts E in each mixture-of-experts (MoE) layer. Default: every layer is dense."""

    moe_layer_freq: str = flag("1", effective="moe_layers")
    """MoE layers: N for layers 0, N, 2N, ..., or a list with 0 or 1 for each layer, such as "([0]*3+[1]*58)"."""

    moe_ffn_hidden_size: int | None = flag(None, effective="moe_ffn_size")
    """Width of one expert; default: ffn-hidden-size."""

    moe_latent_size: int | None = None
    """Latent width of experts (LatentMoE, Nemotron 3): tokens are projected down to this width before dispatch, and
    the sum of the expert outputs is projected up. The router and the shared expert use hidden states of the full width.
    Default: the experts do so too."""

    moe_shared_expert_intermediate_size: int | None = None
    """Width of a shared expert that processes every token; default: no shared expert."""

    moe_shared_expert_gate: bool = flag(False, no_effect_without="--moe-shared-expert-intermediate-size")
    """Multiply the output of the shared expert by a gate, which is the sigmoid of a linear layer with one output per
    token (Qwen2-MoE)."""

    moe_output_norm: bool = False
    """Normalize the sum of the outputs of the routed experts and the shared expert (A.X K1)."""

    moe_zero_experts: int | None = flag(
        None,
        at_least=1,
        excludes=(
            Condition(CAPACITY.text + ": zero-computation experts have no capacity", CAPACITY.holds),
            "--moe-router-group-topk: zero-computation experts belong to no group",
        ),
    )
    """Number of zero-computation experts (LongCat-Flash). The router can select zero-computation experts like other
    experts, but they return their input unchanged, so the amount of computation varies between tokens. Zero-computation
    experts have no parameters, and no token is sent to them."""

    moe_router_topk: int = flag(2, first_run=True)
    """Number of experts (k) to which each token is routed."""

    moe_router_num_groups: int | None = flag(None, no_effect_without="--moe-router-group-topk")
    """Number of groups of equal size into which experts are divided. The router sends each token to experts in
    --moe-router-group-topk of the groups."""

    moe_router_group_topk: int | None = flag(None, needs=GROUPS)
    """Number of expert groups that each token may be routed to (device-limited routing in DeepSeek-V2, node-limited
    routing in DeepSeek-V3). A group's score is the sum of its --moe-router-group-score-topk highest expert scores. The
    groups with the highest scores are selected."""

    moe_router_group_score_topk: int | None = flag(None, at_least=1, no_effect_without="--moe-router-group-topk")
    """Number of highest expert scores that are summed to obtain a group's score: 1 in DeepSeek-V2, 2 in DeepSeek-V3.
    Default: --moe-router-topk / --moe-router-group-topk."""

    moe_router_score_function: str = flag("softmax", choices=SCORE_FUNCTIONS)
    """Score function of the router. sigmoid (DeepSeek-V3) and sqrtsoftplus, the square root of the softplus
    (DeepSeek-V4): scores are divided by the sum of the selected scores. sparsemixer (Phi-3.5-MoE): experts are selected
    one after the other, and the weight of an expert is its softmax among the experts that are not selected yet and
    whose logits are near the largest."""

    moe_router_topk_normalization: bool = flag(
        True, name="--no-moe-router-topk-normalization", no_effect_without=OWN_SCORES
    )
    """Do not divide sigmoid and sqrtsoftplus scores by the sum of the selected scores."""

    moe_router_topk_epsilon: float = flag(
        1e-20,
        at_least=0,
        no_effect_without=(OWN_SCORES, "--moe-router-topk-normalization", "--moe-router-topk above 1"),
    )
    """Epsilon added to the sum of the selected sigmoid or sqrtsoftplus scores before the division."""

    moe_router_pre_softmax: bool = flag(False, no_effect_without="--moe-router-score-function softmax")
    """Apply the softmax to all experts before the top-k selection, instead of to the selected experts after it."""

    moe_apply_probs_on_input: bool = False
    """Multiply the inputs of experts by the router's weights, instead of their outputs (Llama 4)."""

    moe_router_topk_scaling_factor: float | None = None
    """Factor by which the router multiplies the weights of the selected experts."""

    moe_router_enable_expert_bias: bool = False
    """Select experts by score plus a bias, which rises while an expert receives fewer tokens than its share: load
    balancing without an auxiliary loss (arXiv 2408.15664). The bias is added to sigmoid or sqrtsoftplus scores, or
    to the softmax over all experts (ERNIE 4.5, LongCat-Flash)."""

    moe_expert_bias_on_logits: bool = flag(False, no_effect_without="--moe-router-enable-expert-bias")
    """Add the expert bias to the router's logits instead of to the scores (Kolibri)."""

    moe_router_bias_update_rate: float = flag(
        1e-3, no_effect_without="--moe-router-enable-expert-bias", training_only=True
    )
    """Amount by which each iteration raises or lowers the expert bias."""

    moe_router_load_balancing_type: tuple[str, ...] = flag(
        ("aux_loss",), many=True, choices=BALANCINGS, training_only=True
    )
    """Load-balancing method. The auxiliary loss is computed over the tokens of one sequence (seq_aux_loss), or of all
    samples of the global batch so far (aux_loss and global_aux_loss, which are the same here). If several auxiliary
    losses are given, their sum is used. sinkhorn instead balances the selection of experts within each sequence,
    without a loss."""

    moe_aux_loss_coeff: tuple[float, ...] = flag((0.0,), many=True, at_least=0, training_only=True)
    """Coefficient of each auxiliary load-balancing loss; 1e-2 is common (Switch Transformer, Mixtral)."""

    moe_z_loss_coeff: float = flag(0.0, training_only=True)
    """Coefficient of the router's z-loss (arXiv 2202.08906); 1e-3 is common."""

    moe_expert_capacity_factor: float | None = None
    """Capacity of an expert for one sequence, as a multiple of an even share of the tokens. Tokens above the capacity
    are dropped, starting with the smallest router weights. Default: no token is dropped."""

    moe_eval_capacity_factor: float | None = None
    """Capacity of an expert in evaluation; default: moe-expert-capacity-factor."""

    moe_pad_expert_input_to_capacity: bool = flag(
        False, no_effect_without=(CAPACITY, "--moe-token-dispatcher-type alltoall")
    )
    """Pad the tokens sent to each expert to the expert's capacity. All message sizes are then known before routing, so
    the host does not wait before an all-to-all."""

    moe_min_capacity: int = flag(0, no_effect_without=CAPACITY)
    """Smallest capacity of an expert for one sequence, in tokens, if capacity is limited."""

    moe_token_drop_policy: str = flag("probs", choices=("probs", "position"), no_effect_without=CAPACITY)
    """Tokens that an expert drops if it receives more than its capacity: those with the smallest router weights
    (probs), or the last ones in the batch (position)."""

    moe_token_dispatcher_type: str = flag(
        "allgather", choices=("allgather", "alltoall"), without_effect=True, training_only=True
    )
    """Token dispatch: send all tokens to every rank of the expert group (allgather), or each token only to the ranks of
    its experts (alltoall)."""

    moe_grouped_gemm: bool = flag(False, without_effect=True, training_only=True)
    """Use one grouped matrix multiplication for all experts of a rank. Without a grouped kernel, which does not exist
    for fp64 or for rows whose size is not a multiple of 16 bytes, each expert is multiplied separately, with the same
    result."""

    moe_per_layer_logging: bool = flag(False, without_effect=True, training_only=True)
    """Log the load of each expert in each layer, in addition to the mean over layers."""

    @property
    def moe_choices(self) -> int:
        """Number of experts among which the router of a layer chooses, including zero-computation experts; 0 in a dense
        model."""
        return (self.num_experts or 0) + (self.moe_zero_experts or 0)

    def moe_balancing_coeff(self, *types: str) -> float:
        """Return the sum of the coefficients of the auxiliary losses that have one of these types."""
        pairs = zip(
            self.moe_router_load_balancing_type, self.moe_aux_loss_coeff, strict=False
        )  # a validation rule checks the lengths
        return sum(coefficient for kind, coefficient in pairs if kind in types)

    @property
    def moe_drops_tokens(self) -> bool:
        """True if the capacity of experts is limited in training or evaluation."""
        return not (self.moe_expert_capacity_factor is None and self.moe_eval_capacity_factor is None)

    @property
    def moe_router_scores(self) -> str:
        """Name of the function that computes the router's scores: "softmax" for a softmax over the selected experts,
        "pre_softmax" for a softmax over all experts, or another name in SCORE_FUNCTIONS."""
        fixed = [scores for name in ROUTERS if (scores := ROUTERS.facts(name).fixed_scores(self)) is not None]
        softmax = "pre_softmax" if self.moe_router_pre_softmax else "softmax"
        own = softmax if self.moe_router_score_function == "softmax" else self.moe_router_score_function
        return [*fixed, own][0]
