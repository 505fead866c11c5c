"""Linear attention: token mixers that read a state of fixed size in place of all earlier keys and values."""
