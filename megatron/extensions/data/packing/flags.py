"""Flags of packing. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from megatron.core.config.flag_spec import flag
from megatron.core.registry import imported
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megatron.core.datasets.dataset import Dealer, StepShape
    from megatron.core.datasets.gpt_dataset import SampleMaker

WINDOW = 1 << 17


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    own = config.options(PackingConfig)
    if not own.packs:
        if own.packing_window != WINDOW:
            rule, remedy = "has no effect without --sequence-packing best-fit", "add it, or remove the flag"
            yield Problem("--packing-window", own.packing_window, rule, remedy)
        return
    name, value = "--sequence-packing", own.sequence_packing
    if config.data.dataset != "gpt":
        rule = f"packs documents of files, and --dataset-type {config.data.dataset} has its own samples"
        yield Problem(name, value, rule, "remove it, or give --data-path")
    elif config.tokenizer.tokenizer_type is None:
        rule = "needs the end-of-document token of the tokenizer, for padding"
        yield Problem(name, value, rule, "add --tokenizer-type")
    if any(getattr(options, "fim_data", False) for options in config.extension_options):
        rule = "cannot be combined with --fim-data, which changes the lengths of documents"
        yield Problem(name, value, rule, "remove one of them")


@extension_flags(
    "packing of documents", may_change=True, resolve=f"{__package__}.rules:with_documents_apart", rules=rules
)
@dataclass(frozen=True)
class PackingConfig:
    """How documents become samples."""

    sequence_packing: str = flag("greedy", choices=("greedy", "best-fit"))
    """greedy: documents one after the other, cut wherever a sample ends, as in Megatron-LM. best-fit: whole documents,
    which neither attend to nor predict each other; the room that they leave is padded (arXiv 2404.10830)."""

    packing_window: int = flag(WINDOW, above=0)
    """Documents that best-fit packs together. More of them leave less padding."""

    balance_packed_samples: bool = flag(
        False, no_effect_without=("--sequence-packing best-fit", "--reset-attention-mask")
    )
    """Deal the samples of a step to data-parallel replicas and micro-batches so that all have about as many pairs of
    tokens that attend to each other. The samples of a step stay the same."""

    @property
    def packs(self) -> bool:
        """Whether documents stay whole."""
        return self.sequence_packing != "greedy"

    def sample_maker(self) -> SampleMaker | None:
        """What makes samples of whole documents; None if the flags do not ask for it."""
        if not self.packs:
            return None
        made: SampleMaker = partial(imported(f"{__package__}.packed_dataset:PackedDataset"), window=self.packing_window)
        return made

    def line(self, lengths: NDArray | None, seq_length: int, step: StepShape | None) -> str | None:
        """How well documents of these lengths fill samples, and how equal the work of the replicas of a step is."""
        if not self.packs:
            return None
        told: str = imported(f"{__package__}.survey:survey_line")(self, lengths, seq_length, step)
        return told

    def dealer(self, seq_length: int) -> Dealer | None:
        """What deals samples of this length; None if the flags do not ask for it."""
        if not self.balance_packed_samples:
            return None
        made: Dealer = imported(f"{__package__}.dealing:WorkDealer")(seq_length)
        return made


CALLBACKS.register(
    "work of replicas",
    f"{__package__}.hooks:WorkOfReplicas",
    when=lambda config: config.options(PackingConfig).balance_packed_samples,
)
