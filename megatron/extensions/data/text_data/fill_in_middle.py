"""Fill-in-the-middle samples (arXiv 2207.14255). Documents are rearranged so that the middle comes last.

    PSM    <prefix> prefix <suffix> suffix <middle> middle
    SPM    <prefix> <suffix> suffix <middle> prefix middle

Documents are cut between characters, possibly within tokens, and the three parts of each document are tokenized
separately. The random numbers for a sample depend only on the seed and the sample number. They do not depend on the
parallel layout, the number of data loader workers, or restarts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from megatron.core.config.data import DatasetConfig
from megatron.core.datasets.dataset import Dataset
from megatron.core.datasets.gpt_dataset import TextDataset
from megatron.core.datasets.index_cache import content_hash
from megatron.core.tokenizers import Tokenizer
from megatron.extensions.data.text_data.flags import FillInMiddleConfig, of_users
from megatron.training.config.flags import dashed

REPLACEMENT = "\ufffd"
"""Character that decoders insert in place of invalid bytes. Invalid bytes occur at the beginning or end of a document
that was cut within a character, for example at the end of a sample."""


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of special tokens: the markers before the parts of a document, the padding token, and the tokens that
    separate documents and fragments."""

    prefix: int
    middle: int
    suffix: int
    pad: int
    eod: int
    split: int | None = None

    @classmethod
    def of(cls, config: FillInMiddleConfig, tokenizer: Tokenizer) -> SpecialTokens:
        """Look up the ids of the special tokens that the --fim-*-token flags and --fim-split-sample name. Raises a
        ValueError that lists every flag whose token is missing from the tokenizer."""
        fields = {part: f"fim_{part}_token" for part in ("prefix", "middle", "suffix", "pad", "eod")}
        fields["split"] = "fim_split_sample"
        names = {part: name for part, field in fields.items() if (name := getattr(config, field)) is not None}
        ids = {part: tokenizer.find(name) for part, name in names.items()}
        problems = [
            f"{dashed(fields[part])} {names[part]}: the tokenizer has no such token; name one that it has"
            for part, id in ids.items()
            if id is None
        ]
        if ids.setdefault("eod", tokenizer.eod) is None and "eod" not in names:
            problems.append("--fim-data: the tokenizer has no end-of-document token; add --fim-eod-token")
        if problems:
            raise ValueError("\n".join(problems))
        return cls(**ids)  # type: ignore[arg-type]


class FillInMiddle(TextDataset):
    """Data set that wraps another data set and rearranges each document with probability --fim-rate. Samples keep their
    length: excess tokens are cut off, and shorter samples are padded. The loss ignores predictions of padding."""

    def __init__(self, inner: Dataset, config: DatasetConfig, tokenizer: Tokenizer, seed: int) -> None:
        assert isinstance(inner, TextDataset)
        self.inner = inner
        self.config = config.options(FillInMiddleConfig)
        self.tokenizer = tokenizer
        self.seed = seed
        self.tokens = SpecialTokens.of(self.config, tokenizer)
        self.samples = len(inner)
        self.format = replace(inner.format, pad=self.tokens.pad)
        fim = asdict(self.config) | of_users(config)
        self.fingerprint = content_hash({"inner": inner.fingerprint, "fim": fim, "seed": seed})
        bare = tokenizer.tokenize("a")
        self.sources_of = inner.sources_of  # type: ignore[method-assign]
        self._begins = len(bare) > 1 and bare[0] == tokenizer.bos
        self._ends = len(bare) > 1 and bare[-1] == tokenizer.eos

    def origin(self, index: int) -> str:
        return self.inner.origin(index)

    def documents_of(self, index: int) -> list[tuple[int, int, int]]:
        """Return the documents of the sample as they are before fill-in-the-middle rearranges them."""
        return self.inner.documents_of(index)

    def _text(self, index: int) -> NDArray[np.int64]:
        key = blake2b(f"{self.seed} {index}".encode(), digest_size=16).digest()
        draws = np.random.Generator(np.random.PCG64(int.from_bytes(key, "little")))
        text = self.inner.text(index)
        parts: list[Sequence[int]] = []
        for number, document in enumerate(_cut(text, self.tokens.eod)):
            parts += [[self.tokens.eod]] if number else []
            parts.append(self._document(document, draws))
        made = np.concatenate([np.asarray(part, np.int64) for part in parts])[: len(text)]
        return np.pad(made, (0, len(text) - len(made)), constant_values=self.tokens.pad)

    def _document(self, ids: NDArray[np.int64], draws: np.random.Generator) -> Sequence[int]:
        if not len(ids) or draws.random() >= self.config.fim_rate:
            return ids.tolist()
        if self.tokens.split is None:
            return self._permuted(ids, draws)
        made: list[int] = []
        for number, fragment in enumerate(_cut(ids, self.tokens.split)):
            made += [self.tokens.split] if number else []
            chosen = len(fragment) and draws.random() < self.config.fim_fragment_rate
            made += self._permuted(fragment, draws) if chosen else fragment.tolist()
        return made

    def _permuted(self, ids: NDArray[np.int64], draws: np.random.Generator) -> list[int]:
        text = self.tokenizer.detokenize(ids.tolist())
        if self.config.fim_no_prefix is not None and text.startswith(self.config.fim_no_prefix):
            return ids.tolist()
        # If the text contains incomplete characters, token ids are cut instead of text, because tokenizing such a text
        # would change its ids.
        content: str | list[int] = ids.tolist() if REPLACEMENT in text else text
        first, second = sorted(draws.integers(0, len(content) + 1, size=2).tolist())
        prefix, middle, suffix = (
            self._ids(part) for part in (content[:first], content[first:second], content[second:])
        )
        special = self.tokens
        if draws.random() < self.config.fim_spm_rate:
            return [special.prefix, special.suffix, *suffix, special.middle, *prefix, *middle]
        return [special.prefix, *prefix, special.suffix, *suffix, special.middle, *middle]

    def _ids(self, part: str | list[int]) -> list[int]:
        if isinstance(part, list):
            return part
        if not part:
            return []
        ids = list(self.tokenizer.tokenize(part))
        return ids[self._begins : len(ids) - self._ends]


def _cut(ids: NDArray[np.int64], at: int) -> list[NDArray[np.int64]]:
    """Split the token ids at each occurrence of the token `at`. The result does not contain this token."""
    ends = [*np.flatnonzero(ids == at).tolist(), len(ids)]
    starts = [0, *(end + 1 for end in ends[:-1])]
    return [ids[start:end] for start, end in zip(starts, ends, strict=True)]
