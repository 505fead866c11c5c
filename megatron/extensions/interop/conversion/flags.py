"""There are no flags: formats are kinds of paths, see `formats.Format`."""
