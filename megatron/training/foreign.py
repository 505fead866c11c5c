"""Replace functions of other libraries that cannot be observed or silenced in any other way.

For example, the collectives of torch.distributed are replaced to observe every call, because not only this program but
also torch and custom layers call them. The progress output of lm-evaluation-harness is replaced to silence it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_MISSING = object()


@contextmanager
def replaced(*stand_ins: tuple[object, str, object]) -> Iterator[None]:
    """Context manager that temporarily replaces attributes. Each argument is a tuple (owner, name, replacement), where
    the owner is a module, class or object of another library. Do not use this function for code of this program, which
    passes variants as arguments instead.
    """
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
