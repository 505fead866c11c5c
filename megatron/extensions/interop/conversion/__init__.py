"""Conversion of checkpoints between formats, one tensor at a time, without a GPU (`tools/convert_checkpoint.py`).

The extension has no flags. Start with `formats`, which defines sources and targets. `flags` documents the registry of
formats, to which other extensions add theirs. `convert` plans and runs a conversion, `dcp_format` is the format of this
program's checkpoints, and `streaming` writes them tensor by tensor.
"""
