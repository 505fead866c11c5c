"""Conditional writes to Google Cloud Storage and Azure, which fsspec does not support. This module does not import
torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

About = Mapping[str, object]
"""Properties of an object in a store, as returned by the `info` method of the fsspec file system."""


def replace_seen(fs: AbstractFileSystem, scheme: str, place: str, data: bytes, expected: bytes) -> bool:
    """Replace an object if its current content is `expected`. Return False if the content differs.

    Raises NotImplementedError for stores without conditional writes. If another process changes the object between the
    comparison and the write, the store refuses the write, and this function raises the error of the store."""
    if (write := WRITES.get(scheme)) is None:
        raise NotImplementedError(scheme)
    try:
        about = fs.info(place)  # read the properties before the content, so that any later write is detected
        if fs.cat_file(place) != expected:
            return False
        write(fs, place, data, about)
    except FileNotFoundError:
        return False
    return True


def _to_google(fs: AbstractFileSystem, place: str, data: bytes, about: About) -> None:
    bucket, _, key = place.partition("/")
    given = {"uploadType": "media", "name": key, "ifGenerationMatch": about["generation"]}
    headers = {"Content-Type": "application/octet-stream"}
    url = f"{fs.base.removesuffix('storage/v1/')}upload/storage/v1/b/{bucket}/o"
    fs.call("POST", url, headers=headers, data=data, **given)


def _to_azure(fs: AbstractFileSystem, place: str, data: bytes, about: About) -> None:
    from azure.core import MatchConditions  # azure.core is a dependency of adlfs, the fsspec package for Azure

    fs.pipe_file(place, data, etag=about["etag"], match_condition=MatchConditions.IfNotModified)


WRITES: dict[str, Callable[[AbstractFileSystem, str, bytes, About], None]] = {
    **dict.fromkeys(("gs", "gcs"), _to_google),
    **dict.fromkeys(("az", "abfs", "abfss"), _to_azure),
}
"""Maps a URL scheme to a function that replaces an object. The function raises an error if the object has changed since
the properties `about` were read."""
