"""Test that parsers that are written for Megatron-LM's log read all console lines correctly."""

from __future__ import annotations

import re

from megatron.training.metrics import console

RECORD = {
    "iteration": 10,
    "consumed_samples": 80,
    "consumed_tokens": 1280,
    "step_time": 0.123456,
    "tokens_per_second": 1234.5,
    "seconds_left": 3723.4,
    "tflops_per_device": 12.34,
    "mfu": None,
    "learning_rate": 1.5e-4,
    "global_batch_size": 8,
    "lm_loss": 3.25,
    "grad_norm": 1.5,
    "loss_scale": 1.0,
    "skipped_iterations": 0,
    "nan_iterations": 0,
    "spike_iterations": 0,
    "peak_memory_bytes": 2**30,
}


def test_a_log_file_has_the_same_lines_as_the_terminal() -> None:
    assert console.progress_line(RECORD, 100) == (
        " iteration       10/     100 | lm loss: 3.250000E+00 | gradient norm 1.5 | lr 0.00015 | 1:02:03 left | "
        "1,234 tokens/s | step 123.5 ms | 12.3 TFLOP/s | 1.0 GiB | batch 8 | 1,280 tokens"
    )
    more = {"mtp_loss_1": 4.5, "mtp_loss_2": None, "params_norm": 2.0, "num_zeros": 7.0, "skipped_iterations": 3}
    line = console.progress_line(RECORD | more | {"loss_scale": 65536.0}, 100)
    assert "lm loss: 3.250000E+00 | 3 skipped | " in line
    assert line.endswith(" | loss scale 6.55e+04 | mtp loss 1 4.5000 | params norm 2 | num zeros 7")


def test_a_step_without_loss_omits_the_loss_field() -> None:
    """The line of a skipped step has no loss field. A parser therefore reads neither a number nor a word such as "none"
    as its loss."""
    skipped = RECORD | {"lm_loss": None, "grad_norm": None, "skipped_iterations": 1}
    line = console.progress_line(skipped, 100)
    assert "loss:" not in line and "none" not in line and "grad norm" not in line
    assert re.search(r"lm loss: ([0-9.E+-]+)", console.progress_line(RECORD, 100))
