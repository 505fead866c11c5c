"""Test that metric records are served in Prometheus's format. The tests parse them with Prometheus's own parser."""

from __future__ import annotations

import math
import socket
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from megatron.core.config.model import TransformerConfig
from megatron.extensions.observe.logs.flags import LogsConfig
from megatron.training.config.run_config import LoggingConfig, RunConfig
from megatron.training.metrics.sinks import open_sinks


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def configuration(folder: Path, port: int) -> RunConfig:
    logging = LoggingConfig(metrics_file=str(folder / "metrics.jsonl"))
    model = TransformerConfig(hidden_size=64)
    return RunConfig(logging=logging, model=model).with_options(LogsConfig(prometheus_port=port))


def scraped(port: int) -> dict[str, float]:
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert {family.type for family in families} == {"gauge"}
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_the_last_values_are_served_until_the_run_ends(tmp_path: Path) -> None:
    port = free_port()
    sinks = open_sinks(configuration(tmp_path, port), 7)
    assert scraped(port) == {"paritrain_iteration": 7}
    for sink in sinks:
        sink.write({"iteration": 8, "lm_loss": 2.5, "time": 1e9, "mfu": None, "valid_a.b_loss": 3.0})
        sink.write({"iteration": 9, "lm_loss": math.nan, "time": 2e9, "done": True, "table": {"layer": [1], "x": [2]}})
    found = scraped(port)
    assert math.isnan(found.pop("paritrain_lm_loss"))
    assert found.pop("paritrain_last_record_seconds") > 1.7e9
    assert found == {"paritrain_iteration": 9, "paritrain_time": 2e9, "paritrain_valid_a_b_loss": 3.0}
    for sink in sinks:
        sink.close()
    with pytest.raises(OSError, match="refused"):
        scraped(port)


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ValueError, match=rf"--prometheus-port {port}: cannot listen at 127.0.0.1 .*choose a free"):
            open_sinks(configuration(tmp_path, port), 0)


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ValueError, match="needs the prometheus_client package: pip install prometheus_client"):
        open_sinks(configuration(tmp_path, free_port()), 0)
