"""Description of everything that determines the token ids of text files: the content of the text files, the tokenizer's
files and code, and the ids that the tokenizer returns for test texts.

Files are identified by a hash of their content, because files with the same path, modification time or name in the
Hugging Face cache may have different content. The digests are stored next to the tokens, together with the state of
each file, so that later runs need not read the files again.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.core.config.data import TOKENIZERS, TokenizerConfig
from megatron.core.datasets.index_cache import array_digest, content_hash, folder_lock
from megatron.core.fsync import whole_file
from megatron.core.tokenizers import build_tokenizer
from megatron.extensions.data.text_data.fast_tokenizer import PROBES
from megatron.extensions.data.text_data.flags import of_users
from megatron.extensions.data.text_data.inputs import TextFile
from megatron.extensions.data.tokenizers.huggingface import tokenizer_inputs

DIGESTS = "digests.json"
"""Name of the file that maps paths of text files to their digests. The file is in the folder that contains all
tokenized datasets."""

DESCRIPTION = "made_from.json"
"""Name of a file in the folder of each tokenized dataset. The file describes the inputs from which the tokens were
computed."""


def file_digest(path: str | Path) -> str:
    """Return a hash of a file's content."""
    # An empty file cannot be memory-mapped.
    empty = os.stat(path).st_size == 0
    return array_digest(np.empty(0, np.uint8) if empty else np.memmap(path, np.uint8, "r"))


def state_of(path: str) -> list[int]:
    """Return a value that changes whenever the content of a local file changes."""
    state = os.stat(path)
    return [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino, state.st_dev]


@dataclass(frozen=True)
class Digests:
    """Digests of local text files, stored in `folder`."""

    folder: Path

    def of(self, files: Sequence[TextFile]) -> dict[str, str]:
        """Return a dict with one entry per file. The path of a local file is mapped to a hash of the file's content.
        The URL of a remote file is mapped to the state that the store reports.

        If several processes share the folder, one process reads the files while the other processes wait."""
        local = {file.path: state_of(file.path) for file in files if not file.remote}
        found = {file.path: f"{file.size} {file.modified}" for file in files if file.remote}
        if local.keys() - (known := self._known(local)).keys():
            with suppress(FileNotFoundError), folder_lock(self.folder):
                known = self._known(local)
                for path in local.keys() - known.keys():
                    known[path] = file_digest(path)
                self._keep({path: [local[path], digest] for path, digest in known.items()})
        return found | {path: known[path] if path in known else file_digest(path) for path in local}

    def _known(self, states: Mapping[str, list[int]]) -> dict[str, str]:
        kept = self._kept()
        same = (path for path, state in states.items() if kept.get(path, [None])[0] == state)
        return {path: str(kept[path][1]) for path in same}

    def _kept(self) -> dict[str, list[object]]:
        try:
            kept = json.loads((self.folder / DIGESTS).read_text())
        except (OSError, ValueError):
            return {}
        return kept if isinstance(kept, dict) else {}

    def _keep(self, digests: Mapping[str, object]) -> None:
        # Errors are ignored, because the folder may be read-only and the digests are only a cache.
        with suppress(OSError), whole_file(self.folder / DIGESTS) as temporary:
            temporary.write_text(json.dumps(self._kept() | dict(digests), indent=1))


def identity_of(config: TokenizerConfig, vocab_size: int | None) -> dict[str, object]:
    """Return a description of everything that determines the ids of a tokenizer: digests of its files, its ids for test
    texts, the flags of the user's extensions, and a digest of the code if the tokenizer is the user's own. Paths are
    left out, because the ids do not depend on them."""
    kind = str(config.tokenizer_type)
    files = {path.name: file_digest(path) for path in tokenizer_inputs(config)}
    options = of_users(config)["extension_options"]
    files |= {path: file_digest(path) for path in _paths_in(options)}
    code = inspect.getsourcefile(inspect.unwrap(TOKENIZERS[kind]))
    if not getattr(TOKENIZERS[kind], "__module__", "").startswith("megatron.") and code is not None:
        files[Path(code).name] = file_digest(code)
    identity: dict[str, object] = {"type": kind, "files": files, "options": options}
    key = json.dumps([identity, vocab_size], sort_keys=True, default=str)
    return identity | {"ids": _ids_of_probes(key, config, vocab_size)}


_PROBED: dict[str, str] = {}
"""Cached results of `_ids_of_probes`, keyed by tokenizer identity and --vocab-size."""


def _ids_of_probes(identity: str, config: TokenizerConfig, vocab_size: int | None) -> str:
    """Return a hash of the vocabulary size and of the ids that the tokenizer returns for test texts. If two versions of
    a tokenizer package tokenize differently, their hashes differ."""
    if identity not in _PROBED:
        tokenizer = build_tokenizer(config, vocab_size)
        found: list[object] = [tokenizer.vocab_size, tokenizer.eod, tokenizer.bos]
        for text in PROBES:
            try:
                found.append([int(id) for id in tokenizer.tokenize(text)])
            except Exception as error:
                # If the tokenizer raises an exception for a text, hash the name of the exception class instead of ids.
                found.append(type(error).__name__)
        _PROBED[identity] = content_hash({"ids": found})
    return _PROBED[identity]


def _paths_in(options: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """Yield the values of the user's flags that are file paths."""
    values = (value for each in options for value in each.values() if isinstance(value, str) and value)
    yield from (value for value in values if os.path.isfile(value))


# Description files in the folders of tokenized datasets.


def describe_tokens(
    folder: Path,
    described: Mapping[str, object],
    files: Sequence[TextFile],
    digests: Mapping[str, str],
    bad: Sequence[str],
) -> None:
    """Write a description of the tokens into the folder of the tokens. It contains the inputs, the skipped records, and
    checksums.

    Args:
        folder: Folder of the tokens.
        described: Everything that determines the tokens.
        files: Input files.
        digests: Mapping from the path of each input file to its digest.
        bad: Descriptions of the records that were skipped because they could not be read.
    """
    inputs = [{"path": file.path, "bytes": file.size, "content": digests[file.path]} for file in files]
    written = {
        path.name: {"state": _written(path), "content": file_digest(path)}
        for path in sorted(folder.iterdir())
        if path.suffix in (".bin", ".idx")
    }
    told = {**described, "inputs": inputs, "left_out": list(bad), "written": written}
    (folder / DESCRIPTION).write_text(json.dumps(told, indent=1, default=str) + "\n")


def left_out(folder: Path) -> list[str]:
    """Return the unreadable records that were skipped when the tokens in a folder were written."""
    return list(json.loads((folder / DESCRIPTION).read_text())["left_out"])


def damage_of(folder: Path) -> str | None:
    """Return a message if the tokens in a folder have changed since they were written. Otherwise, return None.

    The content of the small .idx file is always checked. The content of the .bin file is checked only if its size or
    modification time has changed."""
    try:
        written = json.loads((folder / DESCRIPTION).read_text())["written"]
        for name, expected in written.items():
            path = folder / name
            if path.suffix == ".bin" and _written(path) == expected["state"]:
                continue
            if file_digest(path) != expected["content"]:
                return f"{path} has changed since it was written"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"{folder / DESCRIPTION} cannot be read ({type(error).__name__}: {error})"
    return None


def _written(path: Path) -> list[int]:
    return [path.stat().st_size, path.stat().st_mtime_ns]
