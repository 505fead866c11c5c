"""What a layer keeps for its backward, against the published formulas, each difference accounted for to the byte."""

from __future__ import annotations

import pytest

from megatron.core.config.model import TransformerConfig
from tools.bench.activation_memory import HOOKED, LAYOUTS, Measurement, main, table

SAMPLES = 2
CONFIG = TransformerConfig(num_layers=2, hidden_size=256, num_attention_heads=4, seq_length=128, vocab_size=128)
SBH = CONFIG.seq_length * SAMPLES * CONFIG.hidden_size
TOKENS = CONFIG.seq_length * SAMPLES

Table = dict[tuple[str, str], tuple[Measurement, float]]


@pytest.fixture(scope="module")
def measured() -> Table:
    return table(CONFIG, SAMPLES)


def expected(layout: str, name: str) -> float:
    """Our own formula: the published one less all that is of size s x s, and with what the kernels keep beside."""
    tp, sequence_parallel = LAYOUTS[layout]
    shards = tp if sequence_parallel else 1  # of what lies between the linear layers
    norms = 2 * 2 * 2 * TOKENS / shards
    if name == "full":
        return 2 * SBH / shards
    log_sum_exp = 4 * CONFIG.num_attention_heads * TOKENS / tp
    kept = 10 * SBH / shards + 24 * SBH / tp + norms + log_sum_exp
    dropped = {
        "none": 0,
        "selective": log_sum_exp,
        "layernorm": 4 * SBH / shards,
        "mlp_act": 8 * SBH / tp,
        "mlp": 16 * SBH / tp,
        "all modules": log_sum_exp + 4 * SBH / shards + 16 * SBH / tp,
    }
    return kept - dropped[name]


def test_every_difference_is_accounted_for(measured: Table) -> None:
    assert len(measured) == len(LAYOUTS) * 7
    for (layout, name), (found, _) in measured.items():
        assert found.left == pytest.approx(expected(layout, name), rel=2e-3), (layout, name)


def test_hooks_see_the_same(measured: Table) -> None:
    for (layout, name), (found, _) in measured.items():
        if name in HOOKED:
            assert found.hooked == pytest.approx(found.left, rel=2e-3), (layout, name)


@pytest.mark.parametrize(
    ("layout", "name", "low", "high"),
    [
        ("TP1", "none", 0.76, 0.79),  # 34 of 34 + 5as/h = 44
        ("TP1", "selective", 1.0, 1.005),
        ("TP1", "full", 1.0, 1.001),
        ("TP2", "none", 0.80, 0.83),
        ("TP2", "selective", 1.0, 1.005),
        ("TP2", "full", 1.0, 1.001),
        ("TP2+SP", "none", 0.76, 0.79),
        ("TP2+SP", "selective", 1.0, 1.005),
        ("TP2+SP", "full", 0.5, 0.501),  # the formula's is not cut over the ranks
    ],
)
def test_ratio_to_the_published_formula(layout: str, name: str, low: float, high: float, measured: Table) -> None:
    found, formula = measured[layout, name]
    assert low <= found.left / formula <= high


def test_table_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("--hidden-size 64 --num-attention-heads 4 --seq-length 32".split()) == 0
    out = capsys.readouterr().out
    assert len([line for line in out.splitlines() if line.startswith("TP")]) == 21
    assert "Reasons for the differences" in out
