"""Pipeline schedules, and how layers are divided among stages."""
