"""Test that malformed values in the rendezvous store are treated as missing values, and cause neither a thread nor a
run to end."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch.distributed as dist

from megatron.training.reliability.failure_report import Failure
from megatron.training.reliability.launch import Launch
from megatron.training.reliability.rank_status import Standing
from megatron.training.reliability.rank_store import Board, Peer, Request
from megatron.training.reliability.stop_requests import StopRequests
from megatron.training.reliability.untrusted import parse_integer, parse_record

PEER = {"host": "node1", "pid": 7, "namespace": "n", "started": "1"}
MALFORMED = [
    ("[", "Expecting"),
    ("", "Expecting"),
    ("[" * 5000, "nested too deeply"),
    ('{"a":' * 9000, "nested too deeply"),
    ("9" * 5000, "Exceeds"),
    ("null", "must be a JSON object"),
    (json.dumps([PEER]), "must be a JSON object, but is a list"),
    (json.dumps({**PEER, "pid": "7"}), "pid is '7', not of type int"),
    (json.dumps({**PEER, "pid": True}), "pid is True, not of type int"),
    (json.dumps({**PEER, "pid": 7.0}), "not of type int"),
    (json.dumps({**PEER, "pid": 10**400}), "not of type int"),
    (json.dumps({**PEER, "host": None}), "host is None, not of type str"),
    (json.dumps({**PEER, "x" * 100: 1}), "unknown field, 'xxx"),
    (json.dumps({"host": "node1"}), "lacks pid, namespace, started"),
]


@pytest.mark.parametrize(("text", "why"), MALFORMED)
def test_a_malformed_record_is_refused_with_the_reason(text: str, why: str) -> None:
    assert parse_record(Peer, json.dumps(PEER)) == Peer(**PEER)  # type: ignore[arg-type]
    for each in (text, text.encode()):
        with pytest.raises(ValueError, match=why) as raised:
            parse_record(Peer, each)
        assert len(str(raised.value)) < 200


@pytest.mark.parametrize("at", ["Infinity", "NaN", "1e999", "true", f"1{'0' * 400}"])
def test_non_finite_times_are_refused(at: str) -> None:
    failure = json.dumps(asdict(Failure(1, "rank 1", "step 3", "an error", "what", "advice", at=1.0)))
    assert parse_record(Failure, failure).at == 1.0
    with pytest.raises(ValueError, match=r"at is .*, not of type float"):
        parse_record(Failure, failure.replace('"at": 1.0', f'"at": {at}'))


@pytest.mark.parametrize("text", ["", "-1", "1.0", "x", "²", "9" * 5000, " 1"])
def test_only_whole_numbers_are_accepted(text: str) -> None:
    assert parse_integer("12") == 12
    with pytest.raises(ValueError, match="must be a whole number"):
        parse_integer(text)


GARBAGE = [b"[" * 5000, b"\xff\xfe\x00", b"3", b"null", b'{"kind": "save"}', b'{"pid": 1}', b"9" * 5000, b"[[[]]]"]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_invalid_values_on_the_board_count_as_missing(garbage: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    board = Board(dist.HashStore(), Launch(0, 1))
    for key in ("cause", "told", "ask/0", "agreed/0", "at/0/0", "peer/0", "place/0", "beat/0"):
        board.store.set(key, garbage)
    for _ in range(3):
        assert board.cause() is board.report() is board.asked(0) is None
        assert board.neighbours() == {} and board.read_all("place", Standing.from_json) == {}
        assert isinstance(board.last_phase(0), str)
    said = capsys.readouterr().err
    assert said.startswith("rank 0 of 1 on ") and said.count("\n") == 1
    assert ": ignored the value of cause in the rendezvous store: " in said
    assert board.ignored.count == 5  # each malformed value is counted once, even though it is read three times
    failure = Failure(0, "rank 0", "step 3", "an error", "what", "advice")
    assert board.post_cause(failure) == failure == board.cause()
    board.ask(0, Request("save", "why"))
    board.ask(0, Request("stop", "later"))
    assert board.asked(0) == Request("save", "why")
    board.ignored.close()
    assert "ignored 5 malformed messages" in capsys.readouterr().err


def test_causes_of_unknown_ranks_and_requests_of_unknown_kinds_are_ignored() -> None:
    board = Board(dist.HashStore(), Launch(0, 2))
    cause = asdict(Failure(0, "rank 0", "step 3", "an error", "what", "advice"))
    wrong: list[dict[str, Any]] = [{"reporter": -1}, {"code": 0}, {"code": 1000}]
    for change in wrong:
        board.store.set("cause", json.dumps(cause | change))
        assert board.cause() is None
    board.store.set("ask/0", '{"kind": "run", "why": "it"}')
    assert board.asked(0) is None
    for pid in (0, -1):  # a signal to pid 0 or to a negative pid would be sent to a process group
        board.store.set("peer/1", json.dumps(PEER | {"pid": pid}))
        assert 1 not in board.neighbours()
        board.peers.clear()


def test_ranks_agree_on_a_request_even_if_strangers_write_to_the_store() -> None:
    store = dist.HashStore()
    boards, requests = [Board(store, Launch(rank, 2)) for rank in range(2)], [StopRequests() for _ in range(2)]
    for _ in range(3):
        assert requests[1].tick()
    store.set("ask/0", "[" * 5000)
    store.set("agreed/0", "soon")
    requests[0].ask(Request("stop", "a signal"))
    for rank in (0, 1, 0, 1):
        assert requests[rank].look(boards[rank], None) is None
        store.set("at/0/1", "-5")
    for rank in (1, 0, 1):
        requests[rank].look(boards[rank], None)
    assert [request.tick() for request in requests] == [True, False]
    assert requests[1].request == Request("stop", "a signal")
