"""Remove URL credentials from files, logs and messages. This module does not import torch.

Flags accept URLs with credentials, such as https://user:password@host/data.jsonl or a presigned link.
`take_credentials` replaces the credentials in a URL with ***. Configurations, and everything derived from them, contain
only the URL with ***. Only the memory of this process contains the full URL. `with_credentials` returns the full URL
when a connection is opened.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

HIDDEN = "***"

_USER = re.compile(
    r"(?P<before>\b(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://)"
    r"(?P<secret>[^/?#\s'\"]*|[^/?#\s'\"@:]+:(?!\d+/)[^?#\s'\"@]*)@"
)
"""Pattern of the user, or user:password, in a URL. The pattern also matches passwords with slashes, although these
should be escaped."""

_VALUE = re.compile(
    r"(?P<before>[?&;#][^=&;#\s'\"]*(?:sig|token|secret|passw|pwd|key|cred|auth|session)[^=&;#\s'\"]*=)"
    r"(?P<secret>[^&;#\s'\"]*[^&;#\s'\":,.)])",
    re.IGNORECASE,
)
"""Pattern of a query parameter that grants access."""

_URLS: dict[str, str] = {}
"""URLs as given, keyed by the same URLs without credentials."""

_SECRETS: set[str] = set()
"""Credentials from all URLs that the user has passed. The credentials are removed from all output, even outside a URL,
because libraries may print them separately."""

SHORTEST = 6
"""Minimum length of secrets that are also replaced outside URLs; shorter secrets could be ordinary words."""


def take_credentials(url: str) -> str:
    """Replace the credentials of a URL with ***, and keep the full URL in this process. A text that is not a URL with
    credentials is returned unchanged."""
    hidden = _hidden(url)
    if hidden != url and HIDDEN not in url:
        _URLS[hidden] = url
        found = [match["secret"] for pattern in (_USER, _VALUE) for match in pattern.finditer(url)]
        found += [part for secret in found for part in secret.split(":")[1:]]
        _SECRETS.update(each for secret in found for each in (secret, unquote(secret)) if len(each) >= SHORTEST)
    return hidden


def with_credentials(url: str) -> str:
    """Return the URL with the credentials that the user passed for it. Raises ValueError if this process does not have
    the credentials. Files never contain these credentials."""
    if url in _URLS or HIDDEN not in url:
        return _URLS.get(url, url)
    raise ValueError(
        "its credentials are not saved with the run; pass the whole URL on the command line, or pass a URL "
        "without credentials and set the credentials in the environment"
    )


def like(url: str, found: str) -> str:
    """Complete the URL `found`, which comes from a listing of the folder `url`. If `found` lacks the user and password
    of `url`, they are added. The returned URL shows credentials as ***."""
    user, other = _USER.search(with_credentials(url)), _USER.search(found)
    if user is not None and other is None and found.startswith(user["before"]):
        found = found.replace(user["before"], f"{user['before']}{user['secret']}@", 1)
    return take_credentials(found)


def redacted(text: str) -> str:
    """Replace the credentials of all URLs in a text. Credentials that this process has received are replaced even where
    they are not part of a URL."""
    if "://" in text:
        text = _hidden(text)
    for secret in _SECRETS:
        text = text.replace(secret, HIDDEN)
    return text


def _hidden(text: str) -> str:
    if "://" not in text:
        return text
    text = _USER.sub(lambda m: f"{m['before']}{HIDDEN}@" if _is_secret(m) else m[0], text)
    return _VALUE.sub(lambda m: f"{m['before']}{HIDDEN}", text)


def _is_secret(user: re.Match[str]) -> bool:
    """Return True if the part of a URL before the `@` is secret. This part is secret if it contains a password, or if
    the URL is a web address, because the part may then be a token. The container in abfs://container@account is not
    secret."""
    return ":" in user["secret"] or user["scheme"].lower() in ("http", "https")
