"""Limits of time for whatever a test waits for.

A limit is there to end a hang, never to judge speed: it lies far above what a slow machine with other work takes. Tests
that are expected to wait (for a timeout of the product) use a short timeout of the product instead.
"""

HANG = 600.0
"""Seconds that a test waits for a process, a file or a line of output."""
