"""Pipeline schedules, and the division of layers among pipeline stages."""
