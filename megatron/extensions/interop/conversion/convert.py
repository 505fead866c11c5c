"""Conversion of a checkpoint to another format. A conversion opens the source, plans the target, and writes the output
atomically."""

from __future__ import annotations

import fcntl
import json
import multiprocessing as mp
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.file_storage import resolved
from megatron.core.dist_checkpointing.path_kind import OURS, PATH_KINDS, kind_of, refusal
from megatron.core.dist_checkpointing.storage import CheckpointError
from megatron.core.fsync import sync_folder
from megatron.core.parallel_state import Axis
from megatron.extensions.interop.conversion.dcp_format import DCPFormat
from megatron.extensions.interop.conversion.formats import MERGE_FILE, Format, Options, Source, Target, Written
from megatron.testing.local_world import run_world
from megatron.training.config.output_files import why_unwritable

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized


@contextmanager
def new_folder(final: Path, force: bool | None = False) -> Iterator[Path]:
    """Context manager that yields a temporary folder next to `final`.

    If the `with` block succeeds, the folder is renamed to `final`. If the block fails, the temporary folder is deleted.
    If the process is killed, the next conversion deletes the temporary folder. `final` therefore never contains a
    partial output. Raises ValueError if `final` exists, unless `final` contains a model and `force` permits replacing
    this model.
    """
    refuse(final, force)
    scratch = final.with_name(f".{final.name}.incomplete")
    final.parent.mkdir(parents=True, exist_ok=True)
    if scratch.exists():
        with _locked(scratch, final):
            shutil.rmtree(scratch)
    scratch.mkdir()
    with _locked(scratch, final):
        try:
            yield scratch
            for folder in (scratch, *(path for path in scratch.rglob("*") if path.is_dir())):
                sync_folder(folder)
            _publish(scratch, final, force)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def refuse(final: Path, force: bool | None) -> None:
    """Raise ValueError if `final` cannot be written or must not be replaced.

    `force` permits replacing a model folder, but no other folder. `force` is None if the program has no flag --force.
    """
    try:
        vacant = not final.exists() or (final.is_dir() and not any(final.iterdir()))
        why = why_unwritable(final.absolute().parent)
    except OSError as error:
        shown = final if len(str(final)) <= 80 else f"{str(final)[:77]}..."
        raise ValueError(f"--output {shown}: {str(error.strerror).lower()}; choose another folder") from None
    if why:
        raise ValueError(f"--output {final}: {why}; choose another folder")
    if vacant:
        return
    if not force:
        remedy = "choose another folder" if force is None else "choose another folder, or replace it with --force"
        raise ValueError(f"--output {final} exists already; {remedy}")
    if not PATH_KINDS.facts(kind_of(final)).model:
        raise ValueError(f"--output {final} contains no model, so --force does not replace it; choose another folder")


def _publish(scratch: Path, final: Path, force: bool | None) -> None:
    refuse(final, force)
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    scratch.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def _locked(folder: Path, final: Path) -> Iterator[None]:
    """Context manager that locks a folder. Raises ValueError if another process has locked the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"--output {final} is being written by another process") from None
    else:
        yield
    finally:
        os.close(descriptor)


WEEK = 7 * 24 * 3600.0


def recognize(path: PurePath, flag: str = "--input") -> Format:
    """Return the format of the checkpoint in a folder. Raises a ValueError that names `flag` if the folder contains no
    checkpoint."""
    kind = kind_of(path)
    found = DCPFormat() if kind in OURS else PATH_KINDS[kind]
    if not isinstance(found, Format):
        remedy = "give the folder of a Hugging Face model (config.json) or of a checkpoint"
        raise ValueError(f"{flag} {refusal(path, remedy)}")
    return found


def formats() -> dict[str, Format]:
    """Return all checkpoint formats, keyed by name. The first one is the format of this program's checkpoints."""
    others = [kind for kind in map(PATH_KINDS.__getitem__, PATH_KINDS) if isinstance(kind, Format)]
    return {each.format: each for each in (DCPFormat(), *others)}


@dataclass(frozen=True)
class Input:
    """Model to convert."""

    format: str
    paths: tuple[PurePath, ...]
    """Paths of the folders from which the weights are read."""

    open: Callable[[Options], Source]

    @classmethod
    def at(cls, path: PurePath, flag: str = "--input") -> Input:
        """Return the model in a folder. Raises a ValueError that names `flag` if the folder contains no model."""
        kind = recognize(path, flag)
        return cls(kind.format, (path,), partial(kind.open, path))


class Conversion:
    """Planned conversion of a folder or an `Input`."""

    def __init__(
        self, given: PurePath | Input, output: Path, to: str | None, options: Options, force: bool | None = False
    ) -> None:
        """Plan the conversion.

        Args:
            given: Model to convert: the path of a folder, or an `Input`.
            output: Folder to write.
            to: Name of the target format; None selects the default.
            options: Options of the output.
            force: True to replace an existing model folder, or None if the program has no flag --force.

        Raises:
            ValueError: A problem that can be detected without reading weights makes the conversion impossible. The
            error message has a single line.
        """
        given = given if isinstance(given, Input) else Input.at(given)
        known = formats()
        usual = next((name for name, each in known.items() if each.usual), "dcp")
        to = to or (usual if given.format == "dcp" else "dcp")
        self.output, self.force = output, force
        refuse(output, force)
        if options.weights is not None and given.format != "dcp":
            raise ValueError(f"--weights {options.weights}: needs a checkpoint of pretrain_gpt.py; remove the flag")
        if any(output.resolve() in (resolved(path), *resolved(path).parents) for path in given.paths):
            raise ValueError(f"--output {output} contains the input; choose another folder")
        self.source: Source = given.open(options)
        self.target: Target = known[to].plan(self.source, output, options)
        self.formats = given.format, to

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.source.notes, *self.target.notes)

    def run(self, workers: int, show: Callable[[int], None] = lambda total: None) -> None:
        """Run the conversion with `workers` processes. `show` is called repeatedly with the number of bytes written so
        far.

        If the conversion raises ValueError or CheckpointError, the output folder is unchanged.
        """
        try:
            with new_folder(self.output, self.force) as folder:
                self.source.check_data()
                if workers == 1:
                    self.target.write(folder, Axis(), _counted(show))
                else:
                    self._write_together(folder, workers, show)
                self.target.finish(folder)
                if self.source.merged is not None:
                    text = json.dumps(self.source.merged, indent=2) + "\n"
                    (folder / MERGE_FILE).write_text(text, encoding="utf-8")
        except (OSError, CheckpointError) as error:
            raise ValueError(self._failure(error)) from error

    def _failure(self, error: Exception) -> str:
        """Return a one-line message about a file that cannot be read or written. Possible causes are a full or faulty
        disk and missing permissions."""
        cause = error if isinstance(error, OSError) else error.__cause__
        if isinstance(cause, ValueError):
            # The writer failed because it could not read a tensor of the source.
            return str(cause)
        if not isinstance(cause, OSError) or cause.strerror is None:
            return str(error)
        path = Path(cause.filename) if isinstance(cause.filename, str) else None
        if path is not None and self.output.absolute().parent not in path.absolute().parents:
            return f"{path}: {cause.strerror.lower()}"
        return f"--output {self.output} cannot be written: {cause.strerror.lower()}; the partial output was deleted"

    def _write_together(self, folder: Path, workers: int, show: Callable[[int], None]) -> None:
        total = mp.get_context("fork").Value("q", 0)
        try:
            problems = run_world(workers, self._worker, folder, total, show, timeout=WEEK)
        except RuntimeError as error:
            raise CheckpointError(f"a worker failed: {str(error).strip().splitlines()[-1]}") from None
        for problem in problems:
            if problem is not None:
                raise ValueError(problem)

    def _worker(
        self, rank: int, world_size: int, folder: Path, total: Synchronized[int], show: Callable[[int], None]
    ) -> str | None:
        world = Axis(dist.group.WORLD, rank, world_size, tuple(range(world_size)))

        def written(count: int) -> None:
            with total.get_lock():
                total.value += count
            if rank == 0:
                show(total.value)

        try:
            self.target.write(folder, world, written)
        except ValueError as error:
            return str(error)
        except (OSError, CheckpointError) as error:
            return self._failure(error)
        return None


def _counted(show: Callable[[int], None]) -> Written:
    """Return a function that adds up the bytes that this process has written and passes the sum to `show`."""
    total = 0

    def written(count: int) -> None:
        nonlocal total
        total += count
        show(total)

    return written


def parse_dtype(name: str) -> torch.dtype:
    """Convert the torch name of a dtype, such as bfloat16, to the dtype. Raises ValueError if weights of this dtype are
    not supported."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
    if name not in names:
        raise ValueError(f"{name!r} must be one of {', '.join(names)}")
    return names[name]


UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: str) -> int:
    """Parse a size such as `5GB`, `500MB` or `2GiB`, or a number of bytes. Raises ValueError if the text is not a
    size."""
    digits = text.rstrip("KMGiBkmgb")
    unit = text[len(digits) :].upper()
    if unit not in UNITS or not digits.replace(".", "", 1).isdigit() or (size := int(float(digits) * UNITS[unit])) < 1:
        raise ValueError(f"{text!r} must be a size such as 5GB, 500MB or 2GiB")
    return size
