"""What a run reports: dashboards, diagnosis, evaluation."""
