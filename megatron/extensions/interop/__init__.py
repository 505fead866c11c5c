"""Interoperability with other programs: checkpoint conversion and flag translation."""
