"""Manual division of layers among pipeline stages. Flags set either the number of layers on the first and the last
rank, or all stages in Megatron-LM's notation.

Flags: --pipeline-model-parallel-layout, --decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers,
--account-for-embedding-in-pipeline-split, --account-for-loss-in-pipeline-split. Read `split.py` first. `layout_text.py`
parses the value of --pipeline-model-parallel-layout.
"""
