"""Observation of runs: dashboards, diagnosis, evaluation."""
