"""Tests of console lines that have Megatron-LM's format."""

from __future__ import annotations

import re
from datetime import datetime

from megatron.extensions.observe.logs.megatron_format import MegatronLines, evaluation_lines, progress_line
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig, TrainingConfig
from megatron.training.metrics.log_formats import LOG_FORMATS
from tests.pure.test_log_format import RECORD

NOW = datetime(2030, 1, 2, 3, 4, 5)


def test_progress_line_matches_megatron() -> None:
    assert progress_line(RECORD, 100, False, NOW) == (
        " [2030-01-02 03:04:05] iteration       10/     100 | consumed samples:           80 | "
        "elapsed time per iteration (ms): 123.5 | learning rate: 1.500000E-04 | global batch size:     8 | "
        "lm loss: 3.250000E+00 | loss scale: 1.0 | grad norm: 1.500 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 |"
    )
    ahead = progress_line(RECORD | {"mtp_loss_1": 4.5, "mtp_loss_2": None}, 100, False, NOW)
    assert "lm loss: 3.250000E+00 | mtp_1 loss: 4.500000E+00 | loss scale" in ahead and "mtp_2" not in ahead
    more = RECORD | {"num_zeros": 7.0, "params_norm": 2.0}
    line = progress_line(more, 100, True, NOW)
    assert "(ms): 123.5 | throughput per GPU (TFLOP/s/GPU): 12.3 | learning rate" in line
    assert "grad norm: 1.500 | num zeros: 7.0 | params norm: 2.000 | number of" in line


def test_validation_lines_match_megatron() -> None:
    ruler, line, end = evaluation_lines("", 10, 3.25).split("\n")
    assert line == " validation loss at iteration 10 | lm loss value: 3.250000E+00 | lm loss PPL: 2.579034E+01 | "
    assert ruler == end == "-" * (len(line) + 1)
    assert " at iteration 10 on validation set | " in evaluation_lines("valid", 10, 3.25)
    assert " at iteration 10 on test set | " in evaluation_lines("test", 10, 3.25)
    assert "PPL: 4.851652E+08" in evaluation_lines("valid", 10, 1e4)
    assert evaluation_lines("", 10, 3.25, shows_perplexity=False).split("\n")[1].endswith("value: 3.250000E+00 | ")


def test_a_loss_with_a_z_loss_has_no_perplexity() -> None:
    for name, word in ("default", "perplexity"), ("megatron", "PPL"):
        for flags, shows in ([], True), (["--z-loss-coeff", "1e-4"], False):
            lines = LOG_FORMATS[name](parse_args(flags), 10)
            assert (word in "".join(lines.evaluation(10, "test", "", 3.25))) == shows


def test_a_step_without_loss_omits_the_loss_field() -> None:
    """The line of a skipped step has no loss field, so a parser finds neither a number nor a word such as "none"."""
    line = progress_line(RECORD | {"lm_loss": None, "grad_norm": None, "skipped_iterations": 1}, 100, True, NOW)
    assert "loss:" not in line and "none" not in line and "grad norm" not in line


def test_a_validation_at_the_end_is_printed_under_both_names() -> None:
    def named(iteration: int, split: str = "valid", **training: bool) -> list[str]:
        config = RunConfig(training=TrainingConfig(eval_interval=4, **training))  # type: ignore[arg-type]
        lines = MegatronLines(config, 8).evaluation(iteration, split, "", 1.0)
        return [re.findall(r"iteration \d+( on \w+)?", each)[0] for each in lines]

    assert named(4) == [""] and named(8) == ["", " on validation"] and named(8, "test") == [" on test"]
    assert named(4, skip_train=True) == [" on validation"]
