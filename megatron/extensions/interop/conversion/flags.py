"""This extension has no flags. It registers each checkpoint format as a path kind; see `formats.Format`."""
