"""The command of lm-evaluation-harness, in which `--model megatron` is a checkpoint of ours.

    python -m megatron.lm_eval_model --model megatron --model_args checkpoint=runs/a --tasks lambada_openai
    torchrun --nproc-per-node 4 -m megatron.lm_eval_model --model megatron --model_args checkpoint=runs/a,tp=2,pp=2 ...

Of several ranks the first one prints and writes results.
"""

from __future__ import annotations

import os
import sys
import tempfile

from megatron.training.reliability.launch import Launch


def main() -> None:
    """Runs the harness on every rank. Its exit code is the program's."""
    try:
        launch = Launch.from_environment()
        from lm_eval.__main__ import cli_evaluate

        import megatron.lm_eval_model.model  # noqa: F401 (registers the model)
    except ImportError as error:
        sys.exit(f"lm-evaluation-harness is not installed ({error}): pip install 'paritrain[lm-eval]', or lm_eval")
    except ValueError as error:
        sys.exit(f"This launch cannot run: {error}")
    if launch.rank == 0:
        cli_evaluate()
        return
    with open(os.devnull, "w") as nowhere, tempfile.TemporaryDirectory() as folder:
        sys.stdout = nowhere
        sys.argv = _elsewhere(sys.argv, folder)
        cli_evaluate()


def _elsewhere(argv: list[str], folder: str) -> list[str]:
    """The arguments of a rank whose results nobody reads."""
    out = []
    words = iter(argv)
    for word in words:
        if word in ("--output_path", "-o"):
            next(words, None)
            out += [word, folder]
        elif word.startswith("--output_path="):
            out.append(f"--output_path={folder}")
        else:
            out.append(word)
    return out


if __name__ == "__main__":
    main()
