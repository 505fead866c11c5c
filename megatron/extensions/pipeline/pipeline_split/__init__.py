"""Manual division of layers among pipeline stages: layer numbers for the first and last rank, or all stages in
Megatron-LM's grammar.

Flags: --pipeline-model-parallel-layout, --decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers,
--account-for-embedding-in-pipeline-split, --account-for-loss-in-pipeline-split. Read `split.py` first. `layout_text.py`
parses the value of --pipeline-model-parallel-layout.
"""
