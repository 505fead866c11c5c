"""Train with `python -m paritrain FLAGS` or `torchrun -m paritrain FLAGS`, which are equivalent to `pretrain_gpt
FLAGS`."""

from __future__ import annotations

import sys

from paritrain.commands import pretrain

if __name__ == "__main__":
    sys.exit(pretrain())
