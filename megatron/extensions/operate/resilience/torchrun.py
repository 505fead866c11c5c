"""torchrun with the rendezvous backend `c10d-open`, a variant of `c10d` that tolerates the loss of hosts.

The two backends differ in four cases.

Under `c10d`, an agent that ends with a failure closes the rendezvous for good. If a host is cut off from the network,
the agent's request to close the rendezvous is delivered once the host is connected again. From then on, no host can
join. Under `c10d-open`, only the end of the run closes the rendezvous.

Under `c10d`, an agent that writes to the store of a lost host waits until TCP times out, which takes a quarter of an
hour. Under `c10d-open`, the agent ends if the store has not answered for some seconds.

Under `c10d`, the agent restarts ranks even if their configuration cannot run on the remaining hosts. Under `c10d-open`,
the agent ends with code 2 if the file named by the environment variable OUTCOME_FILE says that the configuration cannot
run.

Under `c10d-open`, the environment variable RENDEZVOUS_WAITS can name a file that exists while the agent waits for the
other hosts. If the file exists for a long time, a script can conclude that the other hosts have continued without this
host. The agent itself does not detect this.

Usage:

    python -m megatron.extensions.operate.resilience.torchrun --rdzv-backend c10d-open TORCHRUN_FLAGS... PROGRAM...
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import MethodType
from typing import ParamSpec, TypeVar

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler
from torch.distributed.run import main

from megatron.training.reliability.run_status import VARIABLE, ExitCode

BACKEND = "c10d-open"
PATIENCE = float(os.environ.get("RENDEZVOUS_PATIENCE", "1"))
"""Factor that scales all timeouts of this module. Increase it on hosts where processes may be suspended for a long
time."""

REPLY = 6.0 * PATIENCE
"""Socket timeout in seconds for a request to the store."""

ANSWER = 8.0 * PATIENCE
"""Maximum time in seconds to wait for an answer from the store."""


P = ParamSpec("P")
T = TypeVar("T")


def bounded(call: Callable[P, T], seconds: float = ANSWER) -> Callable[P, T]:
    """Return a function that calls `call` with a time limit. The returned function raises RendezvousConnectionError if
    `call` does not return within `seconds`. If an earlier call is still running, the function raises this error
    immediately."""
    hanging = list[threading.Thread]()

    def within(*args: P.args, **kwargs: P.kwargs) -> T:
        results, errors = list[T](), list[BaseException]()

        def run() -> None:
            try:
                results.append(call(*args, **kwargs))
            except BaseException as error:
                errors.append(error)

        if not any(thread.is_alive() for thread in hanging):
            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            thread.join(seconds)
            hanging[:] = [thread] if thread.is_alive() else []
        if errors:
            raise errors[0]
        if not results:
            raise RendezvousConnectionError(f"the rendezvous does not answer: no reply in {seconds:g} s")
        return results[0]

    return within


def _shutdown(handler: DynamicRendezvousHandler) -> bool:
    """Close the rendezvous at the end of a run. After a failure, the rendezvous stays open, and the other hosts notice
    that this host's heartbeats are missing."""
    if sys.exc_info()[0] is not None:
        return False
    return DynamicRendezvousHandler.shutdown(handler)


def unless_refused(join: Callable[[], RendezvousInfo], outcome: Path) -> Callable[[], RendezvousInfo]:
    """Return a function that calls `join` to join the rendezvous. If the file `outcome` says that the configuration
    cannot run, the function exits the process with code 2 instead."""

    def joined() -> RendezvousInfo:
        if outcome.exists() and f"name={ExitCode.BAD_CONFIGURATION.name}\n" in outcome.read_text():
            sys.exit(ExitCode.BAD_CONFIGURATION)
        return join()

    return joined


def marked(join: Callable[[], RendezvousInfo], file: Path) -> Callable[[], RendezvousInfo]:
    """Return a function that calls `join` to join the rendezvous. The function creates `file` before the call, and
    deletes it afterwards."""

    def joined() -> RendezvousInfo:
        file.touch()
        try:
            return join()
        finally:
            file.unlink(missing_ok=True)

    return joined


def create(params: RendezvousParameters) -> RendezvousHandler:
    """Create a rendezvous handler for the backend `c10d-open`."""
    backend, store = create_backend(params)
    # this timeout does not limit connecting, because the host of the store may start later
    store.set_timeout(timedelta(seconds=REPLY))
    backend.get_state = bounded(backend.get_state)  # type: ignore[method-assign]
    backend.set_state = bounded(backend.set_state)  # type: ignore[method-assign]
    handler = create_handler(store, backend, params)
    handler.shutdown = MethodType(_shutdown, handler)  # type: ignore[method-assign]
    if outcome := os.environ.get(VARIABLE):
        handler.next_rendezvous = unless_refused(handler.next_rendezvous, Path(outcome))  # type: ignore[method-assign]
    if waits := os.environ.get("RENDEZVOUS_WAITS"):
        handler.next_rendezvous = marked(handler.next_rendezvous, Path(waits))  # type: ignore[method-assign]
    handler.get_backend = lambda: BACKEND  # type: ignore[method-assign]
    return handler


if __name__ == "__main__":
    rendezvous_handler_registry.register(BACKEND, create)
    main()
