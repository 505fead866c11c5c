"""Mutants of states and activations on the host."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron.extensions.offload.host_update import HostUpdate
from megatron.extensions.offload.saved_activations import ActivationOffload, HostBuffer, HostPool, Part
from tests.parity.mutants.common import mutant, nothing, plant

OFFLOADED = {"world": "2", "pp": "2", "activations": "2 offloaded", "heads": "gqa", "style": "llama"}
OFFLOADED_SPLIT = {"world": "2", "pp": "2", "schedule": "zb-h1", "activations": "2 offloaded", "recompute": "selective"}


@mutant(HostUpdate, "_start_grads", offload="part")
def _gradients_of_the_step_before(self: HostUpdate, chunk: int) -> None:
    """States on the host updated with the gradient of the step before."""
    shard: Any = self.shards[chunk]
    now = shard.device_grads.clone()
    shard.device_grads.copy_(getattr(shard, "before", now))
    _true_start_grads(self, chunk)
    shard.device_grads.copy_(now)
    shard.before = now


@mutant(HostUpdate, "_start_grads", world="2", offload="part")
def _gradients_of_another_chunk(self: HostUpdate, chunk: int) -> None:
    """States on the host updated with the gradient of another chunk."""
    earlier = self.shards[max(0, chunk - 1)].device_grads
    self._grads.start_copy(chunk, lambda slot: self._to_host.copy(earlier, slot[: earlier.numel()]))


@mutant(HostUpdate, "update", world="2", offload="part")
def _without_the_factor(self: HostUpdate, lr: float, weight_decay: float, *args: Any) -> None:
    """Gradients on the host not clipped."""
    _true_host_update(self, lr, weight_decay, *args[:-1], False)


_true_start_grads, _true_host_update = HostUpdate._start_grads, HostUpdate.update


@mutant(HostPool, "take", **OFFLOADED)
def _free_when_taken(self: HostPool, nbytes: int) -> HostBuffer:
    """A host buffer is taken again before its backward.

    In place of a buffer of its own: the next one who asks for as many bytes has it too."""
    buffer = _true_take(self, nbytes)
    self.give_back(buffer)
    return buffer


def _sent_noted(self: Any, x: Tensor) -> Any:
    sent = _true_send(self, x)
    self.__dict__.setdefault("latest", {})[len(x)] = sent[0]
    return sent


def _latest_fetched(self: Any, buffer: HostBuffer, nbytes: int) -> Any:
    """What was sent last of that size: another layer's, or another micro-batch's."""
    return _true_fetch(self, self.latest[nbytes], nbytes)


@mutant(Part, "pack", **OFFLOADED)
def _moved_as_seen(self: Part, x: Tensor) -> Any:
    """Offloaded views begin where their memory does.

    The second view of memory that travels gets the place of the first one."""
    view = _true_pack(self, x)
    return view if isinstance(view, Tensor) else view._replace(offset=0)


_true_take, _true_pack = HostPool.take, Part.pack

_true_send, _true_fetch = ActivationOffload.send, ActivationOffload.fetch


plant(
    "The activations of another micro-batch are fetched",
    (ActivationOffload, "send", _sent_noted),
    (ActivationOffload, "fetch", _latest_fetched),
    **OFFLOADED_SPLIT,
)
plant("Parameters not copied back from the host", (HostUpdate, "_start_params", nothing), offload="part")
