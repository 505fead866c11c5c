"""`python -m paritrain FLAGS` trains, as `pretrain_gpt FLAGS` does; so does `torchrun -m paritrain FLAGS`."""

from __future__ import annotations

import sys

from paritrain.commands import pretrain

if __name__ == "__main__":
    sys.exit(pretrain())
