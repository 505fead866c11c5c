"""Memory of this process gathered into huge pages, so that its forks need not copy a table entry per 4 KiB.

Forked worlds share the modules that the tests have imported, some 300 MB. With small pages, Linux copies 80,000 entries
at each fork and walks through them again when the rank exits.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

HUGE_PAGE = 1 << 21
MADV_COLLAPSE = 25


def collapse_private_memory() -> int:
    """Collapse each aligned 2 MiB of this process's private anonymous memory that Linux can collapse, and return how
    many there were: 0 without Linux 6.1 or later."""
    maps = Path("/proc/self/maps")
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None or not maps.exists():
        return 0
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    collapsed = 0
    for line in maps.read_text().splitlines():
        addresses, access, _, _, inode, *_ = line.split()
        if access != "rw-p" or inode != "0" or "[stack]" in line:
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        first, last = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        for address in range(first, last, HUGE_PAGE):
            collapsed += madvise(address, HUGE_PAGE, MADV_COLLAPSE) == 0
    return collapsed
