"""Synthetic training data that needs no files. The data has a pattern that a model can learn."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.gpt_dataset import TextDataset
from megatron.core.datasets.index_cache import content_hash
from megatron.core.datasets.sample_format import SampleFormat

# Number of token ids that the data contains. ALPHABET is small, so that even a small model sees each token id often in
# its first steps.
ALPHABET = 128
NOISE = 0.05
END_OF_DOCUMENT = 1 / 256
SPLITS = ("train", "valid", "test")


class MockGPTDataset(TextDataset):
    """Noisy affine sequences: token x is followed by a*x + b modulo the size of the alphabet, or sometimes by a random
    token.

    Sample i depends only on (seed, split, i). The map from x to a*x + b is a permutation of the alphabet, and is the
    same for all samples and splits. A model that has learned the map reaches a loss equal to the noise entropy, about
    0.44 nats per token.
    """

    def __init__(self, samples: int, format: SampleFormat, *, seed: int, split: str = "train") -> None:
        self.samples = samples
        self.format = format
        self._stream = [seed, SPLITS.index(split)]
        vocabulary = format.vocab_size or ALPHABET
        self.alphabet = max(1, min(ALPHABET, vocabulary - (format.eod is not None)))
        self.powers, self.sums = _affine_powers(self.alphabet, format.seq_length + 1, seed)
        self.fingerprint = content_hash(
            {"mock": self._stream, "sequence_length": format.seq_length, "alphabet": self.alphabet, "eod": format.eod}
        )

    def origin(self, index: int) -> str:
        """Return `mock:INDEX+0`, because every sample is a separate document that starts at token 0."""
        return f"mock:{index}+0"

    def _text(self, index: int) -> NDArray[np.int64]:
        random = np.random.default_rng([*self._stream, index])
        length = self.format.seq_length + 1
        chance = random.random(length)
        anew = random.integers(self.alphabet, size=length)
        fresh = chance < NOISE
        if self.format.eod is not None:
            ends = chance > 1 - END_OF_DOCUMENT
            fresh[1:] |= ends[:-1]
        fresh[0] = True
        # start[t] is the position of the last random token up to position t. Token t is that random token after
        # applying the map t - start[t] times.
        positions = np.arange(length)
        start = np.maximum.accumulate(positions * fresh)
        steps = positions - start
        text = (self.powers[steps] * anew[start] + self.sums[steps]) % self.alphabet
        if self.format.eod is not None:
            text += text >= self.format.eod
            text[ends] = self.format.eod
        return text


def _affine_powers(modulus: int, count: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return two arrays with the values a**n and b * (1 + a + ... + a**(n-1)), modulo `modulus`, for all n < count. a
    and `modulus` are coprime."""
    random = np.random.default_rng([seed, len(SPLITS)])
    multiplier = int(random.integers(1, max(2, modulus)))
    while np.gcd(multiplier, modulus) > 1:
        multiplier = multiplier % modulus + 1
    offset = int(random.integers(modulus)) | 1
    powers, sums = np.ones(count, np.int64), np.zeros(count, np.int64)
    for n in range(1, count):
        powers[n] = powers[n - 1] * multiplier % modulus
        sums[n] = (sums[n - 1] * multiplier + offset) % modulus
    return powers, sums
