"""The referee uses bounded memory, because it keeps tensors that do not fit into memory in files."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron.extensions import load
from megatron.extensions.interop.conversion.convert import Input
from megatron.extensions.interop.conversion.formats import Options
from megatron.testing.referee.batch import Batch
from megatron.testing.referee.on_disk import LargeTensorsOnDisk, empty_on_disk, saved_on_disk
from megatron.testing.referee.reference import Model

load()
LAYERS = (2, 14)


def test_large_tensors_are_kept_in_files() -> None:
    with LargeTensorsOnDisk():
        large, small = torch.full((300, 300), 2.5, dtype=torch.float64), torch.zeros(9)
        ones, empty = torch.ones(90_000), torch.empty(300, 300, device="cpu")
    assert [each.untyped_storage().filename is not None for each in (large, small, ones, empty)] == [1, 0, 1, 1]
    assert large.eq(2.5).all() and ones.eq(1).all() and large.dtype == torch.float64
    assert torch.zeros(90_000).untyped_storage().filename is None


def test_saved_activations_are_kept_in_files() -> None:
    weight = torch.randn(300, 300, requires_grad=True)
    grads = []
    for _ in range(2):
        y = torch.sin(weight * 2)
        grads += torch.autograd.grad(y.sum(), weight)
        with saved_on_disk():
            y = torch.sin(weight * 2)
            kept = y.grad_fn._saved_self  # type: ignore[union-attr]
            assert kept.untyped_storage().filename is not None
            grads += torch.autograd.grad(y.sum(), weight)
    assert all(torch.equal(grad, grads[0]) for grad in grads)
    assert empty_on_disk(weight).shape == weight.shape


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Yield a list. At the end of the context, the peak growth of the process's anonymous memory in bytes is appended
    to the list."""
    found, done, first = list[int](), threading.Event(), _anonymous()
    peak = [first]

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], _anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
        found.append(peak[0] - first)


def _anonymous() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def test_memory_does_not_grow_with_layers(tmp_path: Path) -> None:
    """The weights and gradients of a layer take 10.5 MB in fp64. With 12 more layers, the peak memory must grow by less
    than the size of four layers."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 64}
    text = torch.randint(0, 64, (1, 129)).numpy()
    batch = Batch(text[:, :-1], text[:, 1:], torch.ones(1, 128).numpy())
    peaks = []
    for layers in LAYERS:
        LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=layers)).save_pretrained(tmp_path / str(layers))
        with peak_memory() as found:
            gradients = Model(Input.at(tmp_path / str(layers)).open(Options())).gradients(batch)
            assert sum(1 for _ in gradients) > 4 * layers
        peaks += found
    weights = 8 * (4 * 256**2 + 3 * 256 * 512)
    assert peaks[1] - peaks[0] < 4 * (2 * weights), peaks
