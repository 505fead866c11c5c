"""This extension has no flags. Formats are kinds of paths, see `formats.Format`."""
