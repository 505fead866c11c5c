"""Flags for sequence packing. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from megatron.core.config.flag_spec import flag
from megatron.core.config.mixers import MIXERS
from megatron.core.registry import imported
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatron.core.attention.tiles import DividesSequences
    from megatron.core.datasets.dataset import Dealer, StepShape
    from megatron.core.datasets.gpt_dataset import SampleMaker

WINDOW = 1 << 17


def divides_by_documents(config: RunConfig) -> bool:
    """Return True if attention divides queries over context-parallel ranks and all layers support an arbitrary
    division. A layer does not support an arbitrary division if its mixer processes whole sequences."""
    try:
        kinds = (*config.model.layers, *config.model.mtp_layers)
    except ValueError:
        # The layer pattern is invalid, which another flag rule reports.
        return True
    mixers = {kind.linear for kind in kinds if kind.linear is not None}
    return config.parallel.ranks_by_queries > 1 and not any(MIXERS.facts(name).whole_sequences for name in mixers)


def hybrid_rules(config: RunConfig) -> Iterator[Problem]:
    """Check the flags of runs with --hybrid-context-parallel."""
    own, parallel = config.options(PackingConfig), config.parallel
    if not own.hybrid_context_parallel or parallel.context_parallel_size == 1:
        return
    name = "--hybrid-context-parallel"
    if not own.packs and not config.data.reset_attention_mask:
        rule = "needs attention that does not cross document boundaries"
        yield Problem(name, None, rule, "add --sequence-packing best-fit or --reset-attention-mask")
    if config.training.micro_batch_size != 1:
        rule = f"must be 1 with {name}: each sample is divided according to its own documents"
        yield Problem("--micro-batch-size", config.training.micro_batch_size, rule, "set it to 1")
    if parallel.cp_comm_type not in ("p2p", "all_gather"):
        rule = f"cannot be combined with {name}: all-to-all sends every token"
        yield Problem("--cp-comm-type", parallel.cp_comm_type, rule, "use p2p or all_gather")
    elif not divides_by_documents(config):
        rule = "cannot be combined with layers that mix tokens other than by the model's attention"
        yield Problem(name, None, rule, "remove one of them")


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    yield from hybrid_rules(config)
    own = config.options(PackingConfig)
    if not own.packs:
        if own.packing_window != WINDOW:
            rule, remedy = "has no effect without --sequence-packing best-fit", "add it, or remove the flag"
            yield Problem("--packing-window", own.packing_window, rule, remedy)
        return
    name, value = "--sequence-packing", own.sequence_packing
    if config.data.dataset != "gpt":
        rule = f"packs documents of files, but --dataset-type {config.data.dataset} makes its own samples"
        yield Problem(name, value, rule, "remove it, or set --data-path")
    elif config.tokenizer.tokenizer_type is None:
        rule = "needs the tokenizer's end-of-document token for padding"
        yield Problem(name, value, rule, "add --tokenizer-type")
    if any(getattr(options, "fim_data", False) for options in config.extension_options):
        rule = "cannot be combined with --fim-data, which changes the lengths of documents"
        yield Problem(name, value, rule, "remove one of them")


@extension_flags(
    "packing of documents", may_change=True, resolve=f"{__package__}.rules:with_documents_apart", rules=rules
)
@dataclass(frozen=True)
class PackingConfig:
    """Options for making samples from documents."""

    sequence_packing: str = flag("greedy", choices=("greedy", "best-fit"))
    """Method of making samples from documents. greedy: concatenate documents and cut them at the ends of samples, as in
    Megatron-LM. best-fit: pack whole documents, which neither attend to nor predict each other, and pad the remaining
    room (arXiv 2404.10830)."""

    packing_window: int = flag(WINDOW, above=0)
    """Number of documents that best-fit packs together. A larger number reduces padding."""

    balance_packed_samples: bool = flag(
        False, no_effect_without="--sequence-packing best-fit or --reset-attention-mask"
    )
    """Balance attention work. Samples of a step are assigned to data-parallel replicas and micro-batches, and tokens of
    a micro-batch to context-parallel ranks, such that all ranks have about the same number of query-key pairs.
    Balancing does not change which samples a step trains on."""

    hybrid_context_parallel: bool = flag(
        False, "--dynamic-context-parallel", no_effect_without="--context-parallel-size above 1"
    )
    """Keep each short document on one context-parallel rank, and divide long documents over all ranks, with equal work.
    The keys and values of documents that stay on one rank are not communicated."""

    max_seqlen_per_dp_cp_rank: int | None = flag(None, above=0, no_effect_without="--hybrid-context-parallel")
    """Length limit, in tokens, of documents that stay on one context-parallel rank. By default, the limit with the
    lowest estimated cost is chosen for each sample."""

    @property
    def packs(self) -> bool:
        """True if samples consist of whole documents."""
        return self.sequence_packing != "greedy"

    def sample_maker(self) -> SampleMaker | None:
        """Return the function that creates packed data sets. Return None if documents are not packed."""
        if not self.packs:
            return None
        made: SampleMaker = partial(imported(f"{__package__}.packed_dataset:PackedDataset"), window=self.packing_window)
        return made

    def line(self, lengths: NDArray | None, seq_length: int, step: StepShape | None) -> str | None:
        """Return a log message that describes how well documents with the given lengths fill samples, and how evenly
        the work of a step is distributed over replicas. Return None if documents are not packed."""
        if not self.packs:
            return None
        told: str = imported(f"{__package__}.survey:survey_line")(self, lengths, seq_length, step)
        return told

    def divider(self, config: RunConfig) -> DividesSequences | None:
        """Return the object that divides training samples over context-parallel ranks. Return None to select the
        default division."""
        asked = self.hybrid_context_parallel or (self.balance_packed_samples and divides_by_documents(config))
        if not asked or config.parallel.context_parallel_size == 1:
            return None
        divider = imported(f"{__package__}.dividing:Divider")
        inner = config.parallel.ranks_by_heads
        made: DividesSequences = divider(self.hybrid_context_parallel, self.max_seqlen_per_dp_cp_rank, inner)
        return made

    def dealer(self, seq_length: int) -> Dealer | None:
        """Create the object that assigns samples of `seq_length` tokens to replicas so that their work is balanced.
        Return None if --balance-packed-samples is not set."""
        if not self.balance_packed_samples:
            return None
        made: Dealer = imported(f"{__package__}.dealing:WorkDealer")(seq_length)
        return made


CALLBACKS.register(
    "work of replicas",
    f"{__package__}.hooks:WorkOfReplicas",
    when=lambda config: config.options(PackingConfig).balance_packed_samples,
)
CALLBACKS.register(
    "work of context ranks",
    f"{__package__}.hooks:WorkOfContextRanks",
    when=lambda config: config.options(PackingConfig).divider(config) is not None,
)
