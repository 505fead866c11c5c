"""torchrun with the rendezvous backend `c10d-open`: `c10d`, but a failed agent does not close it for the other hosts.

torchrun's agent closes the rendezvous for good when it ends by a failure. That of a host whose cable was pulled does so
as well: its request waits in the kernel and is delivered when the cable is plugged. After that no host can join.

    python -m megatron.training.reliability.hosts.torchrun --rdzv-backend c10d-open TORCHRUN_FLAGS... PROGRAM...
"""

from __future__ import annotations

import sys
from types import MethodType

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler
from torch.distributed.run import main

BACKEND = "c10d-open"


def _shutdown(handler: DynamicRendezvousHandler) -> bool:
    """Closes the rendezvous at the end of a run; of a failure, the others notice that this host beats no more."""
    if sys.exc_info()[0] is not None:
        return False
    return DynamicRendezvousHandler.shutdown(handler)


def create(params: RendezvousParameters) -> RendezvousHandler:
    """The handler of `c10d-open`."""
    backend, store = create_backend(params)
    handler = create_handler(store, backend, params)
    handler.shutdown = MethodType(_shutdown, handler)  # type: ignore[method-assign]
    handler.get_backend = lambda: BACKEND  # type: ignore[method-assign]
    return handler


if __name__ == "__main__":
    rendezvous_handler_registry.register(BACKEND, create)
    main()
