"""One-line explanations of torch's reasons for rejecting a pickle. This module does not import torch.

The message of torch's unpickler is not shown, because it suggests turning off `weights_only`. Without `weights_only`, a
file can run arbitrary code.
"""

from __future__ import annotations

import re

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_REASON = re.compile(r"WeightsUnpickler error:\s*(.+)")
_ADVICE = re.compile(r"weights.only|safe_globals|allowlist|trust", re.IGNORECASE)


def why_refused(error: BaseException) -> str:
    """Return the reason why torch rejected a pickle, without the advice that torch adds to the message."""
    text = str(error)
    if "eights only" not in text and "WeightsUnpickler" not in text:
        return text
    if named := _GLOBAL.search(text):
        return f"it asks for {named[1].rstrip('.')}, but only tensors and plain values are read; no code was run"
    reason = _REASON.search(text)
    if reason is None or _ADVICE.search(reason[1]):
        return "it is damaged, or holds more than tensors and plain values; no code was run"
    return f"it is damaged or not a torch.save file ({reason[1].strip()[:100]})"
