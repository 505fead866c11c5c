"""The simulator has no flags and registers no parts."""
