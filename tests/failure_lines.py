"""pytest plugin (`-p tests.failure_lines`) that prints the reason for each failure immediately, in the form of pytest's
summary. Without the plugin, the reasons would be lost if pytest is killed before it prints the summary."""

from __future__ import annotations

import pytest


class FailureLines:
    def __init__(self, config: pytest.Config) -> None:
        self.plugins = config.pluginmanager

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self.plugins.get_plugin("terminalreporter")
        if not report.failed or reporter is None:  # pytest-xdist's worker processes have no terminal reporter
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = str(report.longrepr if crash is None else crash.message).strip().splitlines()
        outcome = "FAILED" if report.when == "call" else "ERROR"
        reporter.ensure_newline()
        reporter.write_line(f"{outcome} {report.nodeid} - {reason[0] if reason else 'no reason'}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FailureLines(config))
