"""Special and added tokens of a Hugging Face tokenizer folder. As in transformers, the following files are read, with
the following precedence.

- tokenizer_config.json contains special tokens with a role, such as `eos_token`, and other special tokens. The key
  `added_tokens_decoder` contains all tokens that are added to the vocabulary.
- If the key `added_tokens_decoder` is missing, special_tokens_map.json overrides the roles, and added_tokens.json adds
  tokens.
- Special tokens whose ids neither these files nor tokenizer.json define are assigned the next free ids.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Union

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

Token: TypeAlias = Union["AddedToken", str]

CONFIG = "tokenizer_config.json"
MAP = "special_tokens_map.json"
ADDED = "added_tokens.json"
FILES = (CONFIG, MAP, ADDED)
"""Names of files that can change the tokens of a tokenizer.json in the same folder."""

DECODER = "added_tokens_decoder"
EXTRA = "extra_special_tokens"
LEGACY_EXTRA = "additional_special_tokens"
"""Key of older tokenizer_config.json files that contains the special tokens without a role."""

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Boolean properties of an added token."""


@dataclass(frozen=True)
class SpecialTokens:
    """Tokens that the files next to a tokenizer.json define."""

    roles: dict[str, Token] = field(default_factory=dict)
    """Mapping from roles, such as "eos_token", to tokens. Each token is an AddedToken or a string."""

    extra: list[Token] = field(default_factory=list)
    """Special tokens that have no role. Each of these tokens is an AddedToken or a string."""

    added: dict[int, AddedToken] = field(default_factory=dict)
    """Mapping from ids to added tokens. Tokens that the tokenizer lacks are added in ascending order of these ids."""

    split: bool = False
    """True to encode special tokens that occur in a text as ordinary text."""

    def role(self, name: str) -> str | None:
        """Return the text of the token with the role `name`. Return None if no token has this role."""
        token = self.roles.get(name)
        return None if token is None else _text(token)

    def add_to(self, tokenizer: Tokenizer) -> None:
        """Add the special tokens that are missing from `tokenizer`. The order is the same as in transformers."""
        from tokenizers import AddedToken

        known = tokenizer.get_added_tokens_decoder().values()
        same = {_identity(token) for token in known}
        new: list[Token] = [token for _, token in sorted(self.added.items()) if _identity(token) not in same]
        names = {_text(token) for token in (*known, *new)}
        by_role = set(filter(None, map(self.role, self.roles)))
        for token in (*self.roles.values(), *self.extra):
            if _text(token) not in names and token not in new:
                # If several tokens have the same text, the last one takes precedence.
                new.append(token)
        made = [AddedToken(token, special=True) if isinstance(token, str) else token for token in new]
        for token in made:
            token.special = token.special or token.content in by_role
        if made:
            tokenizer.add_tokens(made)
        tokenizer.encode_special_tokens = self.split


def read_special_tokens(folder: Path, tokenizer: Tokenizer) -> SpecialTokens:
    """Read the special and added tokens of a folder. `tokenizer` is the `tokenizers.Tokenizer` of the folder's
    tokenizer.json.

    Raises ValueError if a value in these files does not describe a token. The message contains the file name and the
    key.
    """
    config = _Settings.of(folder)
    added: dict[int, AddedToken] = {}
    if DECODER in config:
        added |= _decoder(folder / CONFIG, config[DECODER])
    else:
        named = [token for role, token in config.roles().items() if role in ROLES]
        named += config.extra() if EXTRA in config else []
        added |= _listed(folder / ADDED, {_text(token) for token in named}) | tokenizer.get_added_tokens_decoder()
    by_text = {str(token.content): token for token in added.values()}
    roles = {role: by_text.get(_text(token), token) for role, token in config.roles().items()}
    return SpecialTokens(roles, config.extra(), added, bool(config.get("split_special_tokens", False)))


def role_texts(folder: Path) -> dict[str, str]:
    """Return a mapping from roles, such as "eos_token", to the strings of the special tokens that the files of a folder
    define."""
    return {role: _text(token) for role, token in _Settings.of(folder).roles().items() if role in ROLES}


class _Settings(dict[str, object]):
    """Keys and values of all configuration files. The attribute `files` maps each key to the file from which its value
    was read."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, Path] = {}

    @classmethod
    def of(cls, folder: Path) -> _Settings:
        config = cls()
        config.update(folder / CONFIG)
        if LEGACY_EXTRA in config and not config.get(EXTRA):
            config[EXTRA], config.files[EXTRA] = config.pop(LEGACY_EXTRA), folder / CONFIG
        config.name_extra()
        if DECODER not in config:
            config.update(folder / MAP)
            config.name_extra()
        return config

    def update(self, file: Path) -> None:  # type: ignore[override]
        """Override the current values with the values in `file`. Do nothing if the file does not exist."""
        found = _object(file)
        super().update(found)
        self.files |= dict.fromkeys(found, file)

    def name_extra(self) -> None:
        """Store each extra special token under its role, if the extra special tokens are an object that maps roles to
        tokens."""
        extra = self.get(EXTRA)
        if isinstance(extra, dict):
            file = self.files[EXTRA]
            del self[EXTRA]
            for name, value in extra.items():
                key = f"{EXTRA}.{name}"
                self[key], self.files[key] = _token(file, key, value), file

    def roles(self) -> dict[str, Token]:
        """Return a mapping from roles to tokens."""
        from tokenizers import AddedToken

        found = {role: _token(self.files[role], role, self[role]) for role in ROLES if self.get(role) is not None}
        for key, value in self.items():
            if key in ROLES or not (key.endswith("_token") or key.startswith(f"{EXTRA}.")):
                continue
            if isinstance(value, dict) and "__type" in value:
                found[key] = _token(self.files[key], key, value)
            elif isinstance(value, str | AddedToken):
                # Settings that are not tokens, such as "add_bos_token": true, are skipped.
                found[key] = value
        return found

    def extra(self) -> list[Token]:
        """Return the special tokens to which no role, such as "eos_token", is assigned."""
        key = "extra_special_tokens" if EXTRA in self else LEGACY_EXTRA
        found = self.get(key) or []
        if not isinstance(found, list):
            raise _refusal(self.files[key], key, found, "a list of tokens")
        return [_token(self.files[key], key, each) for each in found]


def _decoder(file: Path, found: object) -> dict[int, AddedToken]:
    if not isinstance(found, dict):
        raise _refusal(file, DECODER, found, "an object of ids and tokens")
    made: dict[int, AddedToken] = {}
    for id, value in found.items():
        if not (id.isascii() and id.isdigit() and len(id) < 10 and isinstance(value, dict)):
            raise _refusal(file, f"{DECODER}.{id}", value, "a token, under its id")
        token = _token(file, f"{DECODER}.{id}", value)
        assert not isinstance(token, str), "made of an object"
        made[int(id)] = token
    return made


def _listed(file: Path, special: set[str]) -> dict[int, AddedToken]:
    """Return the tokens of added_tokens.json, an object that maps strings to ids. `special` contains the special tokens
    as strings."""
    from tokenizers import AddedToken

    made: dict[int, AddedToken] = {}
    for text, id in _object(file).items():
        if not isinstance(id, int) or isinstance(id, bool) or id < 0:
            raise _refusal(file, text, id, "an id")
        made[id] = AddedToken(text, normalized=text not in special, special=text in special)
    return made


def _token(file: Path, key: str, value: object) -> Token:
    """Convert a JSON value to a token. The value is a string or an object with the key "content"."""
    from tokenizers import AddedToken

    if isinstance(value, str) and value:
        return value
    content = value.get("content") if isinstance(value, dict) else None
    flags = {name: value[name] for name in FLAGS if name in value} if isinstance(value, dict) else {}
    if not isinstance(content, str) or not content or not all(isinstance(flag, bool) for flag in flags.values()):
        raise _refusal(file, key, value, 'the text of a token, or an object with its "content"')
    if file.name == MAP:
        flags["special"] = True
    return AddedToken(content, **flags)


def _text(token: Token) -> str:
    return str(getattr(token, "content", token))


def _identity(token: AddedToken) -> tuple[object, ...]:
    return (token.content, *(getattr(token, name) for name in FLAGS))


def _refusal(file: Path, key: str, value: object, rule: str) -> ValueError:
    return ValueError(
        f"--tokenizer-model {file.parent}: {key} in {file} is {_shown(value)}, but must be {rule}; correct the file, "
        "or get it again"
    )


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _object(file: Path) -> dict[str, object]:
    """Read the JSON object in a file. Return an empty dict if the file does not exist. Raises ValueError if the file
    does not contain a JSON object."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--tokenizer-model {file.parent}: {file} is not JSON ({error}); get the file again") from None
    if not isinstance(found, dict):
        raise ValueError(f"--tokenizer-model {file.parent}: {file} is not a JSON object; get the file again")
    return found
