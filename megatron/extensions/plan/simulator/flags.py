"""The simulator has no flags and registers nothing."""
