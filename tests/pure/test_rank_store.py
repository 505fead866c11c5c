"""Test that ranks of two runs that use the same rendezvous port are not mixed up."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron.training.reliability.launch import Launch
from megatron.training.reliability.rank_store import NoStoreError, meet
from tests.forked import PORTS


def test_a_rank_that_reaches_the_store_of_another_run_exits() -> None:
    port = next(PORTS)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
            patch.setenv(name, value)
        patch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        limit, rank = timedelta(seconds=1), Launch(1, 2, 1)
        with pytest.raises(NoStoreError, match=f"another run at 127.0.0.1:{port}: another program; give the two"):
            meet(rank, limit, "board", "--save a")
        store.set("run", "--save b")
        with pytest.raises(NoStoreError, match="rank 1 of the run with --save a has found the store of another run"):
            meet(rank, limit, "board", "--save a")
        store.set("run", "--save a")
        meet(rank, limit, "board", "--save a").set("key", "value")
