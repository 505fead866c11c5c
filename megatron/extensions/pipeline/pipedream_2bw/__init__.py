"""Pipeline schedule PipeDream-2BW, which never flushes the pipeline and keeps two versions of the weights.

Flag: `--pipeline-schedule 2bw`. Read `two_versions.py` first.
"""
