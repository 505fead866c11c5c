"""The coordinate check passes for muP and CompleteP, and fails for standard parametrization."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.coordinate_check import Axis, Measured, config_of, main, slope, verdict

MUP = "--use-mup --mup-base-hidden-size 64 --mup-base-num-layers 2 --mup-base-head-dim 16".split()


def test_slopes_of_power_laws_are_measured() -> None:
    assert slope([1, 2, 8], [3, 6, 24]) == pytest.approx(1)
    assert slope([64, 256], [1.0, 0.5]) == pytest.approx(-0.5)
    assert slope([64, 256], [0.0, 0.0]) == 0
    assert slope([64, 256], [1.0, float("nan")]) == float("inf")


def test_only_logits_may_shrink() -> None:
    def axis(part: str, last: float) -> Axis:
        parts = ("embedding", "attention", "mlp", "stream", "logits")
        sizes = {other: [1.0] for other in parts}
        return Axis("width", [1, 2], [Measured(sizes, sizes), Measured(sizes | {part: [last]}, sizes)])

    assert verdict(axis("logits", 0.5), 0, 0.2)[1] and verdict(axis("stream", 0.9), 0, 0.2)[1]
    assert not verdict(axis("stream", 0.5), 0, 0.2)[1] and not verdict(axis("logits", 2.0), 0, 0.2)[1]


def test_all_sizes_scale_with_the_width() -> None:
    model = config_of(
        ["--ffn-hidden-size", "96", "--group-query-attention", "--num-query-groups", "2"], hidden_size=128
    ).model
    assert (model.hidden_size, model.num_attention_heads, model.head_dim, model.ffn_size) == (128, 8, 16, 192)
    assert model.query_groups == 4


def test_slopes_are_flat_only_with_mup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "check.png"
    sizes = ["--widths", "64", "256", "--depths", "2", "8"]
    assert main([*sizes, "--output", str(picture), "--", *MUP]) == 0
    assert picture.stat().st_size > 0 and "flat: sizes do not depend" in capsys.readouterr().out
    assert main(["--widths", "64", "256"]) == 1
    assert "  not flat" in capsys.readouterr().out


OPTIMIZERS = ("muon --muon-extra-scale-factor 0.2", "muon --muon-scale-mode unit_rms_norm", "sgd --lr 0.03")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_slopes_are_flat_with_every_optimizer(optimizer: str) -> None:
    assert main(["--widths", "64", "256", "--", *MUP, "--optimizer", *optimizer.split()]) == 0


def test_wrong_flags_are_refused() -> None:
    with pytest.raises(ValueError, match="--widths 64: give at least two"):
        main(["--widths", "64"])
    with pytest.raises(ValueError, match="--widths: give two or more, or --depths"):
        main([])
