"""PipeDream-2BW: pipelines that never flush, and that keep two versions of the weights.

Flag: `--pipeline-schedule 2bw`. Read `two_versions.py`.
"""
