"""This extension has no flags. The module registers each checkpoint format as a path kind; see `formats.Format`."""
