"""Prometheus sink for metric records. The first rank serves the metrics at `http://HOST:PORT/metrics`."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron.extensions.observe.logs.flags import LogsConfig
from megatron.training.config.run_config import RunConfig
from megatron.training.metrics.sinks import Record

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

PREFIX = "paritrain"


class PrometheusSink:
    """Prometheus sink that serves the last value of each number in records as a gauge, such as `paritrain_lm_loss` for
    `lm_loss`.

    The gauge `paritrain_last_record_seconds` contains the time of the last record. Values in tables are not served.
    Raises ValueError if `prometheus_client` is not installed, or if the port cannot be used.
    """

    def __init__(self, config: RunConfig, iteration: int) -> None:
        own = config.options(LogsConfig)
        flag = f"--prometheus-port {own.prometheus_port}"
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise ValueError(f"{flag} needs the prometheus_client package: pip install prometheus_client") from error
        self._lock = threading.Lock()
        self._values = {"iteration": float(iteration)}
        self._updated: float | None = None
        registry = CollectorRegistry()
        registry.register(self)
        assert own.prometheus_port is not None, "the sink requires a port"
        try:
            self._server, self._thread = start_http_server(own.prometheus_port, own.prometheus_host, registry)
        except OSError as error:
            rule = f"cannot listen at {own.prometheus_host} ({error.strerror or error})"
            raise ValueError(f"{flag}: {rule}; choose a free port, or an address of this host") from error

    def write(self, record: Record) -> None:
        found = {_name(key): value for key, value in record.items() if _is_number(value)}
        with self._lock:
            self._values |= found
            self._updated = time.time()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return the gauges. The server of `prometheus_client` calls this method on its own threads."""
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:
            values, updated = dict(self._values), self._updated
        if updated is not None:
            about = "Seconds since 1970 at the last metric record"
            yield GaugeMetricFamily(f"{PREFIX}_last_record_seconds", about, updated)
        for name, value in sorted(values.items()):
            yield GaugeMetricFamily(f"{PREFIX}_{name}", f"Value of {name} in metrics.jsonl", value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _name(key: str) -> str:
    """Convert the key of a record to a name that Prometheus accepts, for example `valid_my.set_loss` to
    `valid_my_set_loss`."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", key)


def _is_number(value: object) -> bool:
    """Return True for numbers, including NaN and infinities. Return False for booleans and for integers outside the
    range of a double."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or (math.isfinite(value) and abs(value) < 2**1023)
