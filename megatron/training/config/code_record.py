"""Record of the code that each of a user's runs has used. Checkpoints and configurations of these runs may name the
recorded code, although the command line does not name it again. This module does not import torch.

Code runs only if the command line names it. It is not enough that a checkpoint or configuration names the code, because
these files may come from anywhere. The only exception is a checkpoint or configuration in the --save folder of a run
that the same user started. When a run starts, `record_code` stores the run's folder, and the names and content digests
of the code that the run uses. The record is in the user's state folder, outside the folder of the run. `standing`
compares the code that a file names with the record. No checkpoint can extend the record. Code that has changed since it
was recorded may not run.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, Literal

from megatron.core.dist_checkpointing.file_storage import UrlPath, located
from megatron.core.fsync import whole_file
from megatron.training.config.flags import all_flags, value_of
from megatron.training.config.run_config import RunConfig

Standing = Literal["recorded", "changed", "unknown"]

CODE_SUFFIXES = (".py", ".yaml", ".yml")
"""Suffixes of the files that the digest of a folder covers. YAML files are covered because they may name Python
files."""

MOST_FILES = 10_000
"""Maximum number of files in a recorded folder. A folder with more files is not recorded."""


def state_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of the code records: paritrain/runs in XDG_STATE_HOME, which defaults to ~/.local/state."""
    environ = os.environ if environ is None else environ
    named = environ.get("XDG_STATE_HOME", "")
    root = Path(named) if os.path.isabs(named) else Path.home() / ".local" / "state"
    return root / "paritrain" / "runs"


def record_named_code(config: RunConfig) -> str | None:
    """Record the code that the flags of a run name, if --save is set. If the code cannot be recorded, return a warning
    to print."""
    save, names = config.checkpoint.save, list(config.extensions.extension or ())
    for flag in all_flags():
        if flag.spec.names_code is not None:
            value = value_of(config, flag)
            texts = value if isinstance(value, tuple) else (value,)
            names += [text for text in texts if text is not None and flag.spec.names_code(text)]
    if save is None or not names:
        return None
    try:
        record_code(save, names)
    except OSError as error:
        why = error.strerror or type(error).__name__
        return f"{state_folder()} cannot be written ({why}): later commands for this run must name its extensions again"
    return None


def record_code(run: str | Path, names: Iterable[str]) -> None:
    """Record that a run, started by this user, uses the code with these names. `run` is the run's --save folder.
    Records from earlier starts of the run are kept. Raises OSError if the record cannot be written."""
    found = {_whole(name): digest for name in names if (digest := code_digest(name)) is not None}
    if not found:
        return
    folder, path = _resolved(run), _record_file(_resolved(run))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write_text(json.dumps({"run": str(folder), "code": _recorded(folder) | found}, indent=1), encoding="utf-8")
        file.chmod(0o600)


def standing(source: str | PurePath, name: str) -> Standing:
    """Decide whether code may run that is named in the file or folder `source`.

    The record tells which code was used by the run whose folder contains `source`. Return "recorded" if that run used
    the code and the code has not changed since, "changed" if that run used a different version of the code, and
    "unknown" if that run did not use the code or if there is no such run.
    """
    source, name = _resolved(source), _whole(name)
    digests = [_recorded(folder)[name] for folder in (source, *source.parents) if name in _recorded(folder)]
    if not digests:
        return "unknown"
    return "recorded" if code_digest(name) in digests else "changed"


def code_exists(name: str) -> bool:
    """Return True if a name refers to files that `code_digest` would find."""
    try:
        return next(_code_files(_whole(name)), None) is not None
    except OSError:
        return False


def code_digest(name: str) -> str | None:
    """Return a digest of the paths and contents of the files to which a name refers.

    A name may refer to a Python file, to a module, or to a folder. For a module, the digest covers all files of its
    package and of its parent packages. For a folder, the digest covers all Python and YAML files in it. The digest of a
    YAML file is the digest of the folder that contains the file. Nothing is imported. Return None if the name refers
    to no file or to more than `MOST_FILES` files.
    """
    try:
        files = list(islice(_code_files(_whole(name)), MOST_FILES + 1))
        if not files or len(files) > MOST_FILES:
            return None
        each = [(str(path), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]
    except OSError:
        return None
    return hashlib.sha256(json.dumps(each).encode()).hexdigest()


def _code_files(name: str) -> Iterator[Path]:
    path = Path(name)
    if name.endswith(CODE_SUFFIXES[1:]):
        path = path.parent
    if not os.path.isabs(name):
        yield from _module_files(name)
    elif os.path.isfile(path):
        yield path
    elif os.path.isdir(path):
        yield from _files_in(path)


def _files_in(folder: Path) -> Iterator[Path]:
    yield from sorted(each for each in folder.rglob("*") if each.suffix in CODE_SUFFIXES and each.is_file())


def _module_files(name: str) -> Iterator[Path]:
    """Return the files of a module and of its parent packages. All files of the innermost package are included, because
    the module may import any of these files. A module is searched for in the same folders as an extension that is
    imported."""
    here, names = str(Path.cwd()), name.split(".")
    places = sys.path if here in sys.path else [here, *sys.path]
    package: list[str] = []
    for count in range(1, len(names) + 1):
        spec = PathFinder.find_spec(".".join(names[:count]), places)
        if spec is None:
            raise FileNotFoundError(name)
        if spec.origin and spec.has_location:
            yield Path(spec.origin).resolve()
        places = list(spec.submodule_search_locations or ())
        package = places or package
    for place in package:
        yield from _files_in(Path(place).resolve())


def _recorded(run: Path) -> dict[str, str]:
    """Return the recorded digests of the code that a run has used, keyed by the name of the code. `run` is the run's
    folder.

    Return an empty mapping if there is no valid record. A record is not valid if it belongs to another user, if other
    users may write it, or if it is in the run's folder.
    """
    path = _record_file(run)
    try:
        about = path.stat()
        if run in path.resolve().parents or about.st_uid != os.geteuid() or about.st_mode & 0o022:
            return {}
        record: Any = json.loads(path.read_text(encoding="utf-8"))
        code = record["code"] if record["run"] == str(run) else {}
    except (OSError, ValueError, TypeError, LookupError):
        return {}
    return {name: digest for name, digest in code.items() if isinstance(digest, str)} if isinstance(code, dict) else {}


def _record_file(run: Path) -> Path:
    return state_folder() / f"{hashlib.sha256(str(run).encode()).hexdigest()}.json"


def _whole(name: str) -> str:
    """If `name` is a path, return it as an absolute path without symbolic links. If `name` is the name of a module,
    return it unchanged."""
    is_path = "/" in name or name.endswith(CODE_SUFFIXES) or os.path.isdir(name)
    return str(_resolved(name)) if is_path else name


def _resolved(path: str | PurePath) -> Path:
    if isinstance(found := located(path) if "://" in str(path) else path, UrlPath):
        return Path("/", *found.parts)  # a path that does not exist locally
    return Path(os.path.realpath(os.path.expanduser(path)))
