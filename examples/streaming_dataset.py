"""Data set that a Python generator streams during training. The samples are sums of two numbers as text, such as "3 + 4
= 7".

python pretrain_gpt.py --extension examples/streaming_dataset.py --dataset-type sums --tokenizer-type ByteTokenizer ...
"""

from collections.abc import Iterator, Sequence
from random import Random

from megatron.core.config import DatasetConfig
from megatron.core.datasets.dataset import DATASETS, Datasets
from megatron.core.datasets.sample_format import SampleFormat
from megatron.extensions.data.datasets.generator_dataset import stream_splits


@DATASETS.register("sums")
def sums(config: DatasetConfig, format: SampleFormat, seed: int, sizes: Sequence[int | None]) -> Datasets:
    def stream(split: str, first: int) -> Iterator[bytes]:
        """Yield samples, beginning with sample number `first`. A sample has seq_length + 1 tokens; each byte is a token
        id."""
        number = first
        while True:
            random, text = (
                Random(f"{seed} {split} {number}"),
                b"",
            )  # A sample depends only on its number, so a run can resume exactly.
            while len(text) <= format.seq_length:
                a, b = random.randrange(1000), random.randrange(1000)
                text += f"{a} + {b} = {a + b}\n".encode()
            yield text[: format.seq_length + 1]
            number += 1

    return stream_splits(lambda split, first: map(list, stream(split, first)), format, sizes, f"sums {seed}")
