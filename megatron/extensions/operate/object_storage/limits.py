"""Limits on this process's requests to object storage, and traffic counts. This module does not import torch."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, TypeVar

from megatron.training.reliability.url_credentials import redacted

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")

FIRST_CONTACT = 20.0
"""Maximum time in seconds for which a request is retried before any request of this process has succeeded. This time is
shorter than `Limits.retry_seconds`, so that a wrong URL is reported soon."""

LONGEST_PAUSE = 15.0

FINAL = (
    *(FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(ValueError, TypeError, NotImplementedError, ImportError),
)
"""Exception types of permanent errors, which are not retried."""

FINAL_NAMES = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "InvalidRegionError",
    "ParamValidationError",  # for example, an invalid bucket name
)
"""Names of botocore's exception types for permanent errors."""

FINAL_STATUS = (401, 403, 404, 405, 411, 412, 416, 501)
"""HTTP status codes of permanent errors."""


@dataclass
class Traffic:
    """Traffic counts of this process: bytes transferred and requests retried."""

    read: int = 0
    written: int = 0
    repeated: int = 0
    seconds: float = 0.0
    """Duration of all requests in seconds, summed over threads."""

    upload_memory: int = 0
    """Peak memory of multipart uploads, in bytes."""


@dataclass
class Limits:
    """Limits on the requests of a process to object storage. All methods may be called from several threads."""

    retry_seconds: float = 300.0
    timeout_seconds: float = 60.0
    part_bytes: int = 16 << 20
    bytes_per_second: float = inf
    slowest: float = 1e5
    """Minimum transfer rate in bytes per second. A request that is slower is treated as failed."""

    traffic: Traffic = field(default_factory=Traffic)
    answered: bool = False
    """True if a request of this process has succeeded."""

    _held: int = 0
    """Number of bytes in memory that belong to multipart uploads."""

    _free: float = 0.0
    """Time (`time.monotonic()`) from which the bandwidth limit permits the next transfer."""

    _lock: threading.Lock = field(default_factory=threading.Lock)

    def within(self, fs: AbstractFileSystem, nbytes: int) -> dict[str, float]:
        """Return the fsspec arguments that limit the duration of a request with a body of `nbytes` bytes. By default,
        fsspec's packages limit the time until a response arrives, but not the time for sending the body."""
        return {"timeout": self.timeout_seconds + nbytes / self.slowest} if fs.async_impl else {}

    def move(self, nbytes: int) -> None:
        """Wait until the bandwidth limit permits the transfer of `nbytes` bytes."""
        if self.bytes_per_second == inf:
            return
        with self._lock:
            begins = max(time.monotonic(), self._free)
            self._free = begins + nbytes / self.bytes_per_second
        time.sleep(max(0.0, begins - time.monotonic()))

    def count(self, read: int = 0, written: int = 0, repeated: int = 0, seconds: float = 0.0) -> None:
        """Add the bytes, retries and seconds of a request to the traffic counts."""
        with self._lock:
            self.traffic.read += read
            self.traffic.written += written
            self.traffic.repeated += repeated
            self.traffic.seconds += seconds

    def hold(self, nbytes: int) -> None:
        """Add `nbytes` to the number of bytes that uploads hold in memory. A negative value means that memory was
        released."""
        with self._lock:
            self._held += nbytes
            self.traffic.upload_memory = max(self.traffic.upload_memory, self._held)

    def tried(self, what: object, request: Callable[[int], T], sleep: Callable[[float], object] = time.sleep) -> T:
        """Make a request. If the request fails, retry it with increasing delays, for at most `retry_seconds`.

        `request` is called with the number of the attempt, starting at 0. If the number is above 0, `request` must
        expect that an earlier attempt has succeeded although its response was lost. This method raises an OSError if
        all attempts fail. The message contains `what` and the last error, without credentials. A permanent error is
        raised immediately. Time during which this process was suspended does not count toward `retry_seconds`. At least
        two attempts are made.
        """
        began, attempt = time.monotonic(), 0
        waited = 0.0
        while True:
            started = time.monotonic()
            try:
                done = request(attempt)
            except Exception as error:
                if is_final(error):
                    raise as_os_error(what, error) from None
                waited += min(time.monotonic() - started, self.timeout_seconds)
                pause = min(LONGEST_PAUSE, 0.1 * 2**attempt) * random.uniform(0.5, 1.0)
                limit = self.retry_seconds if self.answered else min(FIRST_CONTACT, self.retry_seconds)
                if attempt and waited + pause > limit:
                    times = f"{attempt + 1} attempts in {time.monotonic() - began:.0f} s"
                    raise OSError(redacted(f"{what}: {_told(error)} ({times})")) from None
            else:
                self.answered = True
                self.count(seconds=time.monotonic() - started)
                return done
            self.count(repeated=1)
            sleep(pause)
            waited += pause
            attempt += 1


def is_final(error: Exception) -> bool:
    """Return True if an error is permanent, so that retrying the request would be useless."""
    return isinstance(error, FINAL) or type(error).__name__ in FINAL_NAMES or _answer(error)[1] in FINAL_STATUS


def _answer(error: BaseException) -> tuple[str, int]:
    """Return the error code and the HTTP status from the response in a botocore error. If the error has no response,
    the code is empty and the status is 0."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    if not isinstance(response, dict):
        return "", 0
    about, metadata = response.get("Error", {}), response.get("ResponseMetadata", {})
    return str(about.get("Code", "")), int(metadata.get("HTTPStatusCode", 0))


def as_os_error(what: object, error: Exception) -> OSError:
    """Convert an error to an OSError of the same kind, without credentials."""
    if isinstance(error, ImportError):
        return OSError(f"{what}: {error}; pip install 'paritrain[remote]', or fsspec's package for this scheme")
    kind = next((kind for kind in FINAL[:5] if isinstance(error, kind)), OSError)
    return kind(redacted(f"{what}: {_told(error)}"))


def _told(error: Exception) -> str:
    name = _answer(error)[0] or type(error).__name__
    return " ".join(f"{name}: {error}".split())[:300]


LIMITS = Limits()
"""Limits on object storage requests of this process, set by the run's flags."""
