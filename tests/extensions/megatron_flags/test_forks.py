"""Tests of flags of Megatron-LM forks. The features of these flags are provided by the examples in this repository."""

from __future__ import annotations

from pathlib import Path

from tests.forked import ROOT, run_program
from tests.tiny import TINY

FLAGS = f"{TINY} --vocab-size 257 --tokenizer-type ByteTokenizer --train-iters 8 --log-interval 2"


def test_flags_of_forks_load_the_examples_that_have_their_parts(tmp_path: Path) -> None:
    flags = [*FLAGS.split(), "--save", str(tmp_path)]
    theirs = "--xielu --goldfish-loss --goldfish-k 50 --goldfish-h 5 --optimizer ademamix --ademamix-beta3-warmup 9"
    done = run_program("pretrain_gpt.py", *flags, *theirs.split(), code=0)
    for line in ("--goldfish-loss loads examples/goldfish_loss.py", "--optimizer ademamix loads"):
        assert line in done.stderr
    lion = "--optimizer muon --muon-scalar-optimizer lion --lion-beta1 0.9 --dry-run".split()
    done = run_program("pretrain_gpt.py", *flags, *lion, code=0)
    assert "--muon-scalar-optimizer lion loads" in done.stderr, done.stderr
    again = run_program("pretrain_gpt.py", "--config", tmp_path / "run_config.yaml", "--load", tmp_path, code=0)
    assert "loaded checkpoint of iteration 8" in again.stdout, again.stderr

    # If the user passes an extension that defines the same flag, the user's extension takes precedence.
    (tmp_path / "own.py").write_text((ROOT / "examples" / "goldfish_loss.py").read_text())
    done = run_program("pretrain_gpt.py", *flags, "--extension", tmp_path / "own.py", "--goldfish-loss", "--dry-run")
    assert done.returncode == 0 and "loads examples" not in done.stderr, done.stderr
