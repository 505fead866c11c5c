"""Functions that a torch.save file may call, and their permitted arguments. No permitted call lets the file choose how
much memory is allocated.

This module does not import torch.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeGuard


class Refused(pickle.UnpicklingError):
    """Raised if a pickle requires something that tensor files do not need."""


class Name(str):
    """Full name (`module.name`) of a class or function to which a pickle refers."""

    __slots__ = ()


OTHER = object()
"""Placeholder for pickled values that no rule inspects."""


@dataclass
class Listed:
    """A list in a pickle. Only the length of the list is tracked, because instructions may append to the list."""

    length: int = 0


@dataclass(frozen=True)
class Made:
    """Stand-in for the return value of a function that a pickle calls."""

    name: str

    size: int | None = None
    """Length of the value in bytes if it is a bytes object, else None."""


@dataclass(frozen=True)
class Storage:
    """Size of a tensor storage: the number of elements, and the number of bytes per element."""

    elements: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize


@dataclass
class Call:
    """Function call in a pickle: the arguments (`given`), and a function (`inner`) that checks a call nested in the
    arguments."""

    given: tuple[object, ...]
    inner: Callable[[object, object], object]

    size: int | None = None
    """Size in bytes of the call's result, set by the rule that checks the call."""


def cost(value: object) -> int:
    """Return an approximate upper bound on the number of bytes that a call copies from an argument."""
    if isinstance(value, Listed):
        return 8 * value.length
    if isinstance(value, Made):
        return value.size or 0
    return len(value) if isinstance(value, str | bytes | tuple) else 0


def _harmless(call: Call) -> str | None:
    return None


def _array_of_bytes(call: Call) -> str | None:
    """Check a call of bytearray. Only text and bytes are accepted as arguments. Numbers, and objects that may be
    numbers, are rejected, because bytearray(n) allocates n bytes."""
    first = call.given[0] if call.given else ""
    call.size = cost(first)
    known = isinstance(first, str | bytes | Listed) or (isinstance(first, Made) and first.size is not None)
    return None if known else "with something other than bytes"


def _bytes_of_text(call: Call) -> str | None:
    """Check the arguments of a call of `_codecs.encode`. Only the encoding that Python uses for bytes is accepted,
    because some codecs expand their input."""
    text, codec = call.given if len(call.given) == 2 else (None, None)
    call.size = cost(text)
    usual = isinstance(text, str) and codec in ("latin1", "latin-1", "utf-8")
    return None if usual else "with an encoding other than latin1"


def _tensor(call: Call) -> str | None:
    """Check a call that creates a view of a storage. The view must fit into the storage, because torch would otherwise
    enlarge the storage."""
    storage, offset, shape, strides = (*call.given, *(None,) * 4)[:4]
    if not isinstance(storage, Storage) or not _natural(offset) or not _naturals(shape) or not _naturals(strides):
        return "without a storage, an offset, sizes and strides"
    if len(shape) != len(strides):
        return "with different numbers of sizes and strides"
    reach = offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    width = _width(call.given[6]) if len(call.given) > 7 else storage.itemsize
    if prod(shape) and reach * width > storage.nbytes:
        return f"for {reach * width:,} bytes of a storage of {storage.nbytes:,}"
    return None


def _width(dtype: object) -> int:
    return ITEMSIZES.get(dtype, 1) if isinstance(dtype, Name) else 1


def _naturals(values: object) -> TypeGuard[tuple[int, ...]]:
    return isinstance(values, tuple) and all(map(_natural, values))


def _natural(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _with_type(call: Call) -> str | None:
    """Check a call of `_rebuild_from_type_v2`, whose arguments are (function, type, arguments, state). The nested call
    `function(*arguments)` must be permitted."""
    if len(call.given) != 4:
        return "with arguments other than function, type, arguments and state"
    call.inner(call.given[0], call.given[2])
    return None


def _empty_array(call: Call) -> str | None:
    """Check a call of numpy's `_reconstruct`, whose arguments must be (ndarray, (0,), ...). A call with these arguments
    creates an empty array, whose shape and values are set afterwards."""
    return None if call.given[1:2] == ((0,),) else "with a shape"


def _one_number(call: Call) -> str | None:
    """Check a call of numpy's `scalar`, whose arguments must be (dtype, bytes). A call without bytes is rejected,
    because the dtype alone would then decide how much memory numpy allocates."""
    return None if len(call.given) == 2 and cost(call.given[1]) else "without the bytes of a number"


def _dtype(call: Call) -> str | None:
    first = call.given[0] if call.given else None
    return None if isinstance(first, str) and re.fullmatch(r"[|<>=]?\w\d{0,4}", first) else "with an unusual type"


RULES: Mapping[str, Callable[[Call], str | None]] = {
    **dict.fromkeys(("collections.OrderedDict", "collections.Counter", "builtins.set", "builtins.complex"), _harmless),
    **dict.fromkeys(("torch.Size", "torch.device", "torch.serialization._get_layout"), _harmless),
    **dict.fromkeys((f"torch._utils._rebuild_parameter{end}" for end in ("", "_with_state")), _harmless),
    "torch.nn.parameter.Parameter": _harmless,
    "builtins.bytearray": _array_of_bytes,
    "_codecs.encode": _bytes_of_text,
    **dict.fromkeys((f"torch._utils._rebuild_tensor{end}" for end in ("", "_v2", "_v3")), _tensor),
    "torch._tensor._rebuild_from_type_v2": _with_type,
    **{f"numpy.{core}.multiarray._reconstruct": _empty_array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _one_number for core in ("core", "_core")},
    "numpy.dtype": _dtype,
}
"""Rules that decide whether a pickle's call is permitted, keyed by the called function. A rule returns the reason for
rejecting a call, or None if the call is permitted. The rule for functions that are always harmless is `_harmless`,
which permits every call."""

_WIDE = {
    **dict.fromkeys(("float64", "double", "int64", "long", "uint64", "complex64", "cfloat"), 8),
    **dict.fromkeys(("float32", "float", "int32", "int", "uint32", "complex32", "chalf", "qint32"), 4),
    **dict.fromkeys(("float16", "half", "bfloat16", "int16", "short", "uint16", "bits16"), 2),
    **dict.fromkeys(("complex128", "cdouble"), 16),
}
ITEMSIZES = {f"torch.{name}": size for name, size in _WIDE.items()}
"""Element size in bytes, keyed by dtype, for dtypes with more than one byte."""

_KINDS = {
    **dict.fromkeys(("ComplexDouble",), 16),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    **dict.fromkeys(("Float", "Int", "QInt32"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Char", "Byte", "Bool", "QInt8", "QUInt8", "QUInt4x2", "QUInt2x4"), 1),
}
STORAGES = {
    **{f"torch.{prefix}{kind}Storage": size for kind, size in _KINDS.items() for prefix in ("", "cuda.")},
    "torch.storage.UntypedStorage": 1,
}
"""Size of an element in bytes, keyed by the name of the storage class."""
