"""Further ways of context parallelism: gathered keys and values, and all-to-all of heads (DeepSpeed Ulysses).

Values of `--cp-comm-type`: all_gather, a2a. Read `attention.py`.
"""
