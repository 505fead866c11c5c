"""The lm-evaluation-harness command, in which `--model megatron` evaluates a checkpoint of this program.

    python -m megatron.lm_eval_model --model megatron --model_args checkpoint=runs/a --tasks lambada_openai
    torchrun --nproc-per-node 4 -m megatron.lm_eval_model --model megatron --model_args checkpoint=runs/a,tp=2,pp=2 ...

Only the first rank prints and writes results.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, redirect_stdout

from megatron.training.reliability.launch import Launch


def main() -> None:
    """Run lm-evaluation-harness on every rank, and exit with the exit code that it returns."""
    try:
        launch = Launch.from_environment()
        from lm_eval.__main__ import cli_evaluate

        from megatron.lm_eval_model.model import ModelArgumentError  # the import registers the model
    except ImportError as error:
        sys.exit(f"lm-evaluation-harness is not installed ({error}): pip install 'paritrain[lm-eval]', or lm_eval")
    except ValueError as error:
        sys.exit(f"This launch cannot run: {error}")
    with ExitStack() as stack:
        if launch.rank:
            stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        try:
            cli_evaluate()
        except ModelArgumentError as error:
            for line in str(error).split("\n") if launch.rank == 0 else ():
                print(f"error: {line}", file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    main()
