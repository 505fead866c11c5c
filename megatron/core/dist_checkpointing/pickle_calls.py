"""Checks the function calls in a torch.save pickle before torch reads the pickle. This module does not import torch.

`torch.load(weights_only=True)` runs no code from a file. However, `torch.load` permits some functions that allocate
memory of a given size or repeat text, so a pickle of 30 bytes may request gigabytes. `check_calls` interprets the
instructions without calling any function. Pickles that `check_calls` cannot interpret to the end are rejected.
`check_calls` supports the same pickle instructions as `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import pickle
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

from megatron.core.dist_checkpointing.pickle_rules import (
    OTHER,
    RULES,
    STORAGES,
    Call,
    Listed,
    Made,
    Name,
    Refused,
    Storage,
    cost,
)

FREE_BYTES = 1 << 20
"""Number of bytes that the calls of a pickle may always allocate, in addition to a multiple of the file size."""


class Bytes(Protocol):
    """Interface shared by `bytes` objects and memory-mapped files."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: slice, /) -> bytes: ...

    def find(self, sub: bytes, start: int = ..., /) -> int: ...


def check_calls(data: Bytes, size: int, also: Collection[str] = (), pickles: int = 1) -> None:
    """Check the first `pickles` pickles of a file, one after another.

    Args:
        data: the bytes of the pickles, and the bytes that follow.
        size: size of the whole file in bytes, which limits the memory that the storages and calls in the pickles may
            allocate.
        also: functions `module.name` that the program permits in addition to `RULES`, and whose calls allocate nothing.

    The function raises pickle.UnpicklingError, with a one-line message, if a call allocates memory of a given size,
    copies too much or is unknown, or if the pickle is damaged.
    """
    reader = _Reader(data, size, also)
    try:
        for _ in range(pickles):
            reader.follow()
    except Refused:
        raise
    except EOFError:
        raise Refused("it is damaged or not a torch.save file (it ends within a pickle)") from None
    except (ValueError, LookupError, AttributeError, TypeError, struct.error, MemoryError) as error:
        why = f"{type(error).__name__} at byte {reader.place} of its pickles"
        raise Refused(f"it is damaged or not a torch.save file ({why})") from None


@dataclass
class _Reader:
    """Pickle interpreter that tracks only the values that rules inspect: numbers, texts, names, tuples and the lengths
    of lists."""

    data: Bytes
    size: int
    also: Collection[str]
    place: int = 0
    stack: list[object] = field(default_factory=list)
    marked: list[list[object]] = field(default_factory=list)
    memo: dict[int, object] = field(default_factory=dict)
    spent: int = 0
    """Number of bytes that the calls of the pickle have allocated so far."""

    storages: dict[str | bytes, Storage] = field(default_factory=dict)
    stored: int = 0
    """Total size of all storages in bytes."""

    def follow(self) -> None:
        """Interpret the instructions of one pickle until its end."""
        self.stack = []
        self.marked = []
        self.memo = {}
        while (code := self.take(1)) != pickle.STOP:
            OPERATIONS[code](self)

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes of the pickle. If `count` exceeds the remaining length, the pickle is rejected,
        because Python would allocate `count` bytes before reading."""
        left = len(self.data) - self.place
        if count > left:
            if count > max(left, 1 << 16):
                raise Refused(f"it states {count:,} bytes, and {left:,} follow")
            raise EOFError
        self.place += count
        return self.data[self.place - count : self.place]

    def number(self, form: str) -> int:
        """Read an integer in the `struct` format `form`."""
        (found,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return int(found)

    def fraction(self) -> float:
        (found,) = struct.unpack(">d", self.take(8))
        return float(found)

    def line(self) -> str:
        start, end = self.place, self.data.find(b"\n", self.place)
        if end < 0:
            raise EOFError
        self.place = end + 1
        return self.data[start:end].decode()

    def pop_mark(self) -> list[object]:
        found, self.stack = self.stack, self.marked.pop()
        return found

    def look_up(self) -> None:
        module, name = self.line(), self.line()
        if (module, name) in NAME_MAPPING:
            module, name = NAME_MAPPING[module, name]
        self.stack.append(Name(f"{IMPORT_MAPPING.get(module, module)}.{name}"))

    def reduce(self) -> None:
        given = self.stack.pop()
        self.stack[-1] = self.call(self.stack[-1], given)

    def new_object(self) -> None:
        given = self.stack.pop()
        self.stack.append(self.call(self.stack.pop(), given))

    def call(self, function: object, given: object) -> object:
        """Return a stand-in for the result of a call, without calling the function. The method raises `Refused` unless
        the rules state that the call is harmless."""
        if not isinstance(function, Name) or not isinstance(given, tuple):
            raise Refused("it calls something other than a function with arguments")
        self.spent += len(given) + sum(map(cost, given))
        if self.spent > 4 * self.size + FREE_BYTES:
            raise Refused(f"its calls create more than {self.spent:,} bytes, but the file has only {self.size:,}")
        if function in self.also:
            return OTHER
        if function not in RULES:
            raise Refused(f"it asks for {function}, but only tensors and plain values are read; no code was run")
        call = Call(given, self.call)
        if why := RULES[function](call):
            raise Refused(f"it calls {function} {why}")
        return Made(str(function), call.size)

    def build(self) -> None:
        """Check the BUILD instruction, which sets the state of an object. For an array, the state consists of a shape
        and values."""
        state, built = self.stack.pop(), self.stack[-1]
        if isinstance(built, Made) and built.name.startswith("torch."):
            raise Refused(f"it changes the result of {built.name}")
        if not isinstance(built, Made) or not built.name.endswith("._reconstruct"):
            return
        _, shape, _, _, values = state if isinstance(state, tuple) and len(state) == 5 else (None,) * 5
        listed = values.length if isinstance(values, Listed) else None
        counted = isinstance(shape, tuple) and all(type(each) is int for each in shape) and prod(shape) == listed
        if not counted and not (isinstance(values, Made) and values.size is not None):
            raise Refused("it has an array whose number of values differs from its shape")

    def load_storage(self) -> None:
        """Check the description of a storage, ('storage', type, key, place, elements, ...), because torch may allocate
        the storage before it reads the data."""
        given = self.stack.pop()
        kind, key, _, count = given[1:5] if isinstance(given, tuple) and len(given) >= 5 else (None,) * 4
        if not isinstance(kind, Name) or kind not in STORAGES or type(count) is not int or count < 0:
            raise Refused("it has a storage of an unknown type or size")
        found = Storage(count, STORAGES[kind])
        if not isinstance(key, str | bytes) or self.storages.setdefault(key, found) != found:
            raise Refused("it has a storage without a key, or two storages with the same key")
        if found is self.storages[key]:
            self.stored += found.nbytes
        if self.stored > self.size:
            raise Refused(f"it states storages of {self.stored:,} bytes, and has {self.size:,}")
        self.stack.append(found)

    def append(self, count: int) -> None:
        if isinstance(self.stack[-1], Listed):
            self.stack[-1].length += count

    def mark(self) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def join(self, count: int) -> None:
        self.stack[-count:] = [tuple(self.stack[-count:])]


def _push(value: Callable[[_Reader], object]) -> Callable[[_Reader], None]:
    def push(reader: _Reader) -> None:
        found = value(reader)  # value() may pop values from the stack, so call it before the append
        reader.stack.append(found)

    return push


def _put(form: str) -> Callable[[_Reader], None]:
    def put(reader: _Reader) -> None:
        reader.memo[reader.number(form)] = reader.stack[-1]

    return put


def _get(form: str) -> Callable[[_Reader], None]:
    return _push(lambda reader: reader.memo[reader.number(form)])


def _append(reader: _Reader) -> None:
    reader.stack.pop()
    reader.append(1)


def _set_item(reader: _Reader) -> None:
    del reader.stack[-2:]


OPERATIONS: Mapping[bytes, Callable[[_Reader], object]] = {
    pickle.PROTO: lambda reader: reader.take(1),
    pickle.GLOBAL: _Reader.look_up,
    pickle.REDUCE: _Reader.reduce,
    pickle.NEWOBJ: _Reader.new_object,
    pickle.BUILD: _Reader.build,
    pickle.BINPERSID: _Reader.load_storage,
    pickle.APPEND: _append,
    pickle.APPENDS: lambda reader: reader.append(len(reader.pop_mark())),
    pickle.SETITEM: _set_item,
    pickle.SETITEMS: _Reader.pop_mark,
    pickle.MARK: _Reader.mark,
    pickle.TUPLE: _push(lambda reader: tuple(reader.pop_mark())),
    pickle.TUPLE1: lambda reader: reader.join(1),
    pickle.TUPLE2: lambda reader: reader.join(2),
    pickle.TUPLE3: lambda reader: reader.join(3),
    pickle.NONE: _push(lambda reader: None),
    pickle.NEWFALSE: _push(lambda reader: False),
    pickle.NEWTRUE: _push(lambda reader: True),
    pickle.EMPTY_TUPLE: _push(lambda reader: ()),
    pickle.EMPTY_LIST: _push(lambda reader: Listed()),
    pickle.EMPTY_DICT: _push(lambda reader: OTHER),
    pickle.EMPTY_SET: _push(lambda reader: OTHER),
    pickle.BININT: _push(lambda reader: reader.number("<i")),
    pickle.BININT1: _push(lambda reader: reader.number("B")),
    pickle.BININT2: _push(lambda reader: reader.number("<H")),
    pickle.BINFLOAT: _push(_Reader.fraction),
    pickle.BINUNICODE: _push(lambda reader: reader.take(reader.number("<I")).decode("utf-8", "surrogatepass")),
    pickle.SHORT_BINSTRING: _push(lambda reader: reader.take(reader.number("B"))),
    pickle.LONG1: _push(lambda reader: int.from_bytes(reader.take(reader.number("B")), "little", signed=True)),
    pickle.BINGET: _get("B"),
    pickle.LONG_BINGET: _get("<I"),
    pickle.BINPUT: _put("B"),
    pickle.LONG_BINPUT: _put("<I"),
}
"""Functions that interpret pickle instructions, keyed by instruction. The keys are the instructions that
`torch.load(weights_only=True)` supports."""
