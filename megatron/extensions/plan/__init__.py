"""Planning: a run's memory, step time and layout, predicted before it starts."""
