"""Conversion of checkpoints between formats, one tensor at a time, without a GPU (`tools/convert_checkpoint.py`).

It has no flags. Read `formats` first: what a source provides and a target does with it. `flags` has the registry of
formats, to which other extensions add theirs; `convert` plans and runs a conversion; `dcp_format` is that of this
program's checkpoints; `streaming` writes them tensor by tensor.
"""
