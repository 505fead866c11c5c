"""This extension has no flags. Formats are path kinds; see `formats.Format`."""
