"""Process that serves a store for the parent processes of all ranks, if the launcher serves no store.

torch serves a store in a thread of the process that opens the store. A parent must not have such a thread, because
parents fork. The forked child would inherit the locks that the thread holds, but not the thread that releases these
locks, and could wait forever.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from datetime import timedelta
from typing import NoReturn

from megatron.extensions.operate.job_restarts.forking import fork
from megatron.training.reliability.child_processes import process_state
from megatron.training.reliability.launch import SIGNALS, Launch
from megatron.training.reliability.rank_store import NoStoreError, meet


class StoreProcess:
    """Child of worker 0 that serves the store until worker 0 ends. Signals that request the run to save do not end this
    process."""

    def __init__(self, launch: Launch, timeout: timedelta, name: str, run: str) -> None:
        """Fork the process and wait until it serves the store. `rank_store.meet` describes the arguments.

        Raises NoStoreError if the process cannot open the store."""
        read, write = os.pipe()
        self.pid = fork()
        if not self.pid:
            os.close(read)
            _serve(launch, timeout, name, run, write)
        os.close(write)
        with os.fdopen(read) as report:
            said = report.read()
        if not said:
            raise NoStoreError("the process that serves the store ended before it could open the store")
        if failure := json.loads(said):
            raise NoStoreError(failure["why"], waited=failure["waited"])

    def resume(self) -> bool:
        """Resume the process if a signal (SIGSTOP) has stopped it. Return True if the process was stopped."""
        was_stopped = process_state(self.pid) == "T"
        if was_stopped:
            os.kill(self.pid, signal.SIGCONT)
        return was_stopped


def _serve(launch: Launch, timeout: timedelta, name: str, run: str, report: int) -> NoReturn:
    """Open the rendezvous store, and serve it until this process is killed. If the store cannot be opened, write the
    reason to the pipe `report` and exit."""
    try:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        try:
            store = meet(launch, timeout, name, run)  # this variable keeps the store open until the process ends
        except NoStoreError as error:
            os.write(report, json.dumps({"why": str(error), "waited": error.waited}).encode())
            os._exit(1)
        os.write(report, b"{}")
        os.close(report)
        while store is not None:
            threading.Event().wait()
    finally:
        os._exit(1)
