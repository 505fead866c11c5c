"""Stand-ins for functions of other libraries, where those have no other way to watch or to silence them.

They are the collectives of torch.distributed, which our code, torch's own and a user's layer call alike, and the bars
and prints of lm-evaluation-harness.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_MISSING = object()


@contextmanager
def replaced(*stand_ins: tuple[object, str, object]) -> Iterator[None]:
    """Takes (owner, name, stand-in): within the block each stand-in is the attribute of that name of its owner, a
    module, class or object of another library. Our own code takes what differs as an argument."""
    with ExitStack() as stack:
        for owner, name, stand_in in stand_ins:
            home: str = getattr(owner, "__module__", None) or vars(owner)["__name__"]
            assert home.partition(".")[0] != "megatron", f"{home}.{name} is ours"
            stack.callback(_restore, owner, name, vars(owner).get(name, _MISSING))
            setattr(owner, name, stand_in)
        yield


def _restore(owner: object, name: str, before: object) -> None:
    if before is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, before)
