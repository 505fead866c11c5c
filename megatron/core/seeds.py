"""Seeds for each use of random numbers."""

from __future__ import annotations

from hashlib import blake2b


def site_key(seed: int, name: str) -> int:
    """A number in [0, 2**63) for one use of random numbers in a run, such as one dropout of one layer."""
    digest = blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
