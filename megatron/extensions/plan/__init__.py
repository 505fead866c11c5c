"""Memory, time and layout of a run before it starts."""
