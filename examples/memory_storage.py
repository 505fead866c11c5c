"""Storage for URLs of the form mem://HOST:PORT/NAME, backed by a server that keeps objects in memory.

python -m examples.memory_storage 127.0.0.1:5151 &
RUN=mem://127.0.0.1:5151/run
python pretrain_gpt.py --extension examples/memory_storage.py --save $RUN --load $RUN ...

Like a cloud object store, the storage cannot rename objects, and writes every object as a whole.
"""

import json
import sys
from contextlib import suppress
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePath
from typing import ClassVar
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from megatron.core.dist_checkpointing.file_storage import STORAGES, Storage


@STORAGES.register("mem")
class MemoryStorage(Storage):
    def names(self, folder: PurePath) -> list[str]:
        names = json.loads(self._ask("GET", folder / "?list"))
        return sorted({name.partition("/")[0] for name in names})

    def size(self, path: PurePath) -> int | None:
        with suppress(FileNotFoundError):
            return int(self._ask("HEAD", path))
        return None

    def read(self, path: PurePath, start: int = 0, length: int | None = None) -> bytes:
        end = "" if length is None else start + length - 1
        return self._ask("GET", path, Range=f"bytes={start}-{end}")

    def write(self, path: PurePath, data: bytes) -> None:
        self._ask("PUT", path, data)

    def remove(self, path: PurePath) -> None:
        for name in (below := self.names(path)):
            self.remove(path / name)
        if not below:
            self._ask("DELETE", path)

    def _ask(self, method: str, path: PurePath, data: bytes | None = None, **headers: str) -> bytes:
        request = Request(f"http:{str(path).removeprefix(f'{self.scheme}:')}", data, headers, method=method)
        try:
            with build_opener(ProxyHandler({})).open(request, timeout=60) as answer:
                return answer.headers["Content-Length"].encode() if method == "HEAD" else answer.read()
        except HTTPError as error:
            raise FileNotFoundError(f"there is no {path}") if error.code == 404 else error from None
        except (HTTPException, URLError) as error:
            raise OSError(f"{path}: {error}") from error


class Server(BaseHTTPRequestHandler):
    objects: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        folder, wanted, _ = self.path.partition("?list")
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        below = [name.removeprefix(folder) for name in [*self.objects] if name.startswith(folder)]
        whole = json.dumps(below).encode() if wanted else self.objects.get(self.path)
        self.answer(whole and whole[int(first) : int(last) + 1 if last else None])

    def do_HEAD(self) -> None:
        self.answer(self.objects.get(self.path))

    def do_PUT(self) -> None:
        self.objects[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(b"")

    def do_DELETE(self) -> None:
        self.answer(b"" if self.objects.pop(self.path, None) is not None else None)

    def answer(self, data: bytes | None) -> None:
        self.send_response(404 if data is None else 200)
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else data or b"")

    def log_message(self, *args: object) -> None:
        """Do not print requests."""


if __name__ == "__main__":
    host, _, port = sys.argv[1].partition(":")
    server = ThreadingHTTPServer((host, int(port)), Server)
    print(f"mem://{host}:{server.server_address[1]}", flush=True)
    server.serve_forever()
