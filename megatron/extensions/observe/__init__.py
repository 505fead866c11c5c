"""Observability of runs: dashboards, diagnosis, evaluation."""
