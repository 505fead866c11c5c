"""Random seeds: one key for each use of random numbers, derived from the run's seed."""

from __future__ import annotations

from hashlib import blake2b


def site_key(seed: int, name: str) -> int:
    """Returns a seed in [0, 2**63) for one use of random numbers, such as one dropout of one layer, named by `name`."""
    digest = blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
