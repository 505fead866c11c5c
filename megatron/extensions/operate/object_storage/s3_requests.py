"""S3 requests for which fsspec has no methods: multipart uploads from memory, and conditional reads and writes.

This module does not import torch.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.extensions.operate.object_storage.limits import LIMITS

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from fsspec import AbstractFileSystem

AT_ONCE = 4
"""Maximum number of parts of an object that are uploaded concurrently."""

SMALLEST_PART = 5 << 20


STORES_TELL = ("pre-condition", "PreconditionFailed", "ConditionalRequestConflict", "ConditionNotMet")
"""If the error message of a store contains one of these words, the condition of a write was not met."""


def is_precondition(error: BaseException) -> bool:
    """Return True if an error means that a store refused a conditional request because the object has changed."""
    told = f"{error} {error.__cause__}"
    return any(word in told for word in STORES_TELL)


class S3(NamedTuple):
    """Requests to S3 through the connection of an s3fs file system. `place` converts a path to BUCKET/KEY."""

    fs: AbstractFileSystem
    place: Callable[[PurePath], str]

    def call(self, name: str, path: PurePath, **given: Any) -> Any:
        """Send a request for one object, without retries."""
        bucket, _, key = self.place(path).partition("/")
        limit = LIMITS.within(self.fs, len(given.get("Body", b"")))
        return self.fs.call_s3(name, Bucket=bucket, Key=key, **given, **limit)

    def replace(self, path: PurePath, data: bytes, expected: bytes | None) -> bool:
        """Write an object if its current content is `expected`. If `expected` is None, write the object if it does not
        exist. Return False if the content is not `expected`, or if the object exists although `expected` is None."""
        condition = {"IfNoneMatch": "*"}
        if expected is not None:
            try:
                tag = self.tag(path)
                if self.fs.cat_file(self.place(path)) != expected:
                    return False
            except FileNotFoundError:
                return False
            condition = {"IfMatch": tag}  # the tag was read before the content, so any later write is detected
        self.call("put_object", path, Body=data, **condition)
        return True

    def tag(self, path: PurePath) -> str:
        """Return the ETag of an object, which identifies its content."""
        return str(self.call("head_object", path)["ETag"])

    def read(self, path: PurePath, start: int, length: int, tag: str) -> bytes:
        """Read a range of an object. Raises FileExistsError if the ETag of the object is no longer `tag`."""
        from fsspec.asyn import sync  # an optional dependency

        given = {"Range": f"bytes={start}-{start + length - 1}", "IfMatch": tag}
        try:
            body = self.call("get_object", path, **given)["Body"]
        except Exception as error:
            if not is_precondition(error):
                raise
            raise FileExistsError("the object has been replaced since this process began to read it") from None

        async def content() -> bytes:
            try:
                return bytes(await body.read())
            finally:
                body.close()

        return bytes(sync(self.fs.loop, content, **LIMITS.within(self.fs, length)))

    def append(self, path: PurePath, data: bytes) -> None:
        """Append `data` to a large object. The store copies the existing content of the object, so only the new content
        is uploaded."""
        upload = self.call("create_multipart_upload", path)["UploadId"]
        try:
            old = {"CopySource": self.place(path), "PartNumber": 1, "UploadId": upload}
            first = self.call("upload_part_copy", path, **old)["CopyPartResult"]["ETag"]
            last = self.call("upload_part", path, Body=data, PartNumber=2, UploadId=upload)["ETag"]
            self.complete(path, upload, [first, last])
        except BaseException:
            self.abort(path, upload)
            raise

    def complete(self, path: PurePath, upload: str, tags: list[str]) -> None:
        """Create an object from the parts that were uploaded for it."""
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
        self.call("complete_multipart_upload", path, UploadId=upload, MultipartUpload={"Parts": parts})

    def abort(self, path: PurePath, upload: str) -> None:
        """Abort a multipart upload, so that the store deletes its parts. Errors from the store are ignored."""
        with suppress(Exception):
            self.call("abort_multipart_upload", path, UploadId=upload)

    def abort_uploads(self, prefix: PurePath, attempt: int = 0) -> None:
        """Abort all incomplete multipart uploads under a prefix, so that the store deletes their parts."""
        bucket, _, key = self.place(prefix).partition("/")
        listed = self.fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key)
        for upload in listed.get("Uploads", []):
            self.fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])


class Parts(io.RawIOBase):
    """Writable file that is uploaded in parts while it is being written. The object exists only after the file is
    closed.

    `put` writes a small object with a single request, and `size` returns the current size of the object. At most
    `AT_ONCE` + 1 parts of the file are in memory at the same time.
    """

    def __init__(self, s3: S3, path: PurePath, put: Callable[[bytes], None], size: Callable[[], int | None]) -> None:
        self._s3, self._path = s3, path
        self._put, self._size = put, size
        self._next = bytearray()
        self._upload = ""
        self._tags = list[str]()
        self._sent = 0
        self._under_way = deque[Future[str]]()
        self._pool: ThreadPoolExecutor | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._sent + len(self._next)

    def write(self, data: ReadableBuffer) -> int:
        given = memoryview(data).cast("B")
        at = 0
        while at < len(given):
            taken = given[at : at + LIMITS.part_bytes - len(self._next)]
            self._next += taken
            LIMITS.hold(len(taken))
            at += len(taken)
            if len(self._next) >= LIMITS.part_bytes:
                self._send()
        return len(given)

    def close(self) -> None:
        if self.closed:
            return
        try:
            self._finish()
        except BaseException:
            if self._upload:
                self._s3.abort(self._path, self._upload)
            raise
        finally:
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)
            self._drop()
            super().close()

    def discard(self) -> None:
        """Close the file without creating the object."""
        if self.closed:
            return
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._s3.abort(self._path, self._upload)
        self._drop()
        super().close()

    def __del__(self) -> None:
        """Discard the file if it was never closed."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._drop()

    def _drop(self) -> None:
        """Free the buffer with the data that no upload request contains yet."""
        LIMITS.hold(-len(self._next))
        self._next.clear()

    def _finish(self) -> None:
        if not self._upload:
            self._put(bytes(self._next))
            return
        if self._next:
            self._send()
        while self._under_way:
            self._tags.append(self._under_way.popleft().result())

        def completed(attempt: int) -> None:
            # if the object already has the right size, an earlier attempt has completed the upload, and its response
            # was lost
            if not attempt or self._size() != self._sent:
                self._s3.complete(self._path, self._upload, self._tags)

        LIMITS.tried(self._path, completed)

    def _send(self) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="upload")
            begun = LIMITS.tried(self._path, lambda _: self._s3.call("create_multipart_upload", self._path))
            self._upload = begun["UploadId"]
        if len(self._under_way) == AT_ONCE:
            self._tags.append(self._under_way.popleft().result())
        data, number = bytes(self._next), len(self._tags) + len(self._under_way) + 1
        self._sent += len(data)
        LIMITS.hold(len(data))
        self._drop()
        sent = self._pool.submit(self._send_part, data, number)
        sent.add_done_callback(partial(_freed, len(data)))
        self._under_way.append(sent)

    def _send_part(self, data: bytes, number: int) -> str:
        def sent(attempt: int) -> str:
            LIMITS.move(len(data))
            given = {"Body": data, "PartNumber": number, "UploadId": self._upload}
            tag: str = self._s3.call("upload_part", self._path, **given)["ETag"]
            LIMITS.count(written=len(data))
            return tag

        return LIMITS.tried(self._path, sent)


def _freed(nbytes: int, sent: Future[str]) -> None:
    """Subtract `nbytes` from the number of upload bytes in memory, after a part was sent or discarded."""
    LIMITS.hold(-nbytes)
