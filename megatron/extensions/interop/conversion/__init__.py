"""Conversion of checkpoints between formats, one tensor at a time, without a GPU (`tools/convert_checkpoint.py`).

The extension has no flags. Read `formats` first, which defines the interfaces of sources and targets. Other extensions
register their formats in `PATH_KINDS`. `convert` plans and runs a conversion, `dcp_format` implements the format of
this program's checkpoints, and `streaming` writes checkpoints of this format tensor by tensor.
"""
