"""Credentials in data URLs are used for the connection, but are never written to logs, messages or files."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megatron.training.config.arguments import parse_args, save_config
from megatron.training.config.flags import values_by_section, without_credentials
from megatron.training.config.problem import Problem
from megatron.training.reliability import url_credentials
from megatron.training.reliability.run_status import record_event
from megatron.training.reliability.url_credentials import like, redacted, take_credentials, with_credentials
from tests.forked import run_program

PASSWORD, SIGNATURE = "hunter2%40secret", "signature77"
USER_URL = f"http://user:{PASSWORD}@HOST/d.jsonl"
SIGNED_URL = f"http://HOST/d.jsonl?v=2&X-Amz-Signature={SIGNATURE}"
SECRETS = (PASSWORD, "hunter2@secret", SIGNATURE)


@pytest.fixture(autouse=True)
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the recorded URLs and secrets of this process."""
    monkeypatch.setattr(url_credentials, "_URLS", {})
    monkeypatch.setattr(url_credentials, "_SECRETS", set())


HIDDEN = {
    "https://user:password@host/d.jsonl": "https://***@host/d.jsonl",
    "https://token123@host/d.jsonl": "https://***@host/d.jsonl",
    "set=ftp://user:p@ss@host/d.jsonl@0:0.9": "set=ftp://***@host/d.jsonl@0:0.9",
    "s3://AKIA1234:ab/cd+ef@bucket/d.jsonl": "s3://***@bucket/d.jsonl",
    "https://host/d?X-Amz-Credential=A%2Fb&X-Amz-Signature=c&v=2": (
        "https://host/d?X-Amz-Credential=***&X-Amz-Signature=***&v=2"
    ),
    "https://a.blob/d?sv=2&SIG=ab%3D": "https://a.blob/d?sv=2&SIG=***",
    "simplecache::https://u:password@host/d": "simplecache::https://***@host/d",
}
PLAIN = (
    "s3://bucket/folder",
    "s3://bucket@0:0.5",
    "abfs://container@account.dfs.core.windows.net/d",
    "hf://datasets/user/repo@main/d.parquet",
    "http://host:8080/a@b/d.jsonl",
    "https://host/d.jsonl?version=3",
    "data/a@b:c/text",
)


@pytest.mark.parametrize("url", HIDDEN)
def test_credentials_are_hidden_and_kept_for_the_connection(url: str) -> None:
    hidden = take_credentials(url)
    assert hidden == HIDDEN[url] and with_credentials(hidden) == url
    assert take_credentials(hidden) == hidden
    assert redacted(f"cannot open {url}: timeout") == f"cannot open {hidden}: timeout"


@pytest.mark.parametrize("url", PLAIN)
def test_other_urls_are_unchanged(url: str) -> None:
    assert take_credentials(url) == with_credentials(url) == redacted(url) == url


def test_a_password_alone_is_hidden_in_library_messages() -> None:
    take_credentials(f"ftp://user:{PASSWORD}@host/d")
    assert redacted("530 user/hunter2@secret is not accepted") == "530 user/*** is not accepted"


def test_listed_files_keep_the_credentials() -> None:
    folder = take_credentials(f"ftp://user:{PASSWORD}@host/folder")
    assert with_credentials(like(folder, "ftp://host/folder/d.jsonl")) == f"ftp://user:{PASSWORD}@host/folder/d.jsonl"


def test_a_configuration_contains_no_credentials(tmp_path: Path) -> None:
    (tmp_path / "flags.yaml").write_text(f"valid-data-path: '{SIGNED_URL}'\n")
    config = parse_args(["--config", str(tmp_path / "flags.yaml"), "--train-data-path", "0.5", USER_URL])
    save_config(config, tmp_path / "saved.yaml")
    (tmp_path / "list.txt").write_text(USER_URL)
    made = without_credentials(config.__class__(data=config.data.__class__(data_path=(USER_URL,))))
    record_event(tmp_path, "end", why=f"cannot read {USER_URL}")
    problem = Problem("--data-path", (USER_URL,), f"no {SIGNED_URL}", "correct it")
    long = Problem("--data-path", SIGNED_URL.replace("?", f"?X-Amz-Security-Token={SIGNATURE * 200}&"), "no", "no")
    texts = [
        str(long),
        repr(config),
        json.dumps(values_by_section(config)),
        repr(made),
        str(problem),
        str(problem.record),
    ]
    texts += [(tmp_path / name).read_text() for name in ("saved.yaml", "run_events.jsonl")]
    for text in texts:
        assert "***" in text and not any(secret in text for secret in SECRETS)


def test_saved_urls_ask_for_their_credentials() -> None:
    with pytest.raises(ValueError, match="its credentials are not saved with the run; pass the whole URL"):
        with_credentials("https://***@host/d.jsonl")


class Handler(BaseHTTPRequestHandler):
    """HTTP handler that sends a text file to clients that supply the password or the signature."""

    protocol_version = "HTTP/1.1"
    text = b'{"text": "some words of a document"}\n' * 60

    def do_HEAD(self) -> None:
        user = base64.b64encode(b"user:hunter2@secret").decode()
        allowed = self.headers.get("Authorization") == f"Basic {user}" or f"Signature={SIGNATURE}" in self.path
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(self.text) if allowed else 0))
        self.end_headers()
        if allowed and self.command == "GET":
            self.wfile.write(self.text)

    do_GET = do_HEAD

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def host() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("url", [USER_URL, SIGNED_URL], ids=["user", "signature"])
def test_a_run_reads_the_data_and_writes_no_credentials(url: str, host: str, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    flags = (
        "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --tokenizer-type ByteTokenizer --cpu "
        f"--train-iters 1 --eval-iters 0 --lr 1e-3 --data-cache-path {tmp_path}/cache --save {tmp_path}/run"
    ).split()
    given = url.replace("HOST", host)
    done = run_program("pretrain_gpt.py", *flags, "--data-path", given, code=0)
    mistaken = given.replace(PASSWORD, "mistaken").replace(SIGNATURE, "mistaken")
    wrong = run_program("pretrain_gpt.py", *flags, "--data-path", mistaken, code=2)
    again = run_program("pretrain_gpt.py", "--config", f"{tmp_path}/run/run_config.yaml", "--train-iters", "2", code=2)
    assert "its credentials are not saved with the run" in again.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"metadata.json", "run_config.yaml"} < {path.name for path in written}
    texts = [path.read_text(errors="replace") for path in written]
    texts += [program.stdout + program.stderr for program in (done, wrong)]
    assert not any(secret in text for text in texts for secret in (*SECRETS, "mistaken"))
