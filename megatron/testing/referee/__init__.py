"""What another program computed from a model and a batch, judged tensor by tensor: `tools/referee.py`.

Read first: `reference.py` (loss and gradients in fp64, in one process), `dumps.py` (gradients that another program has
written), `attribution.py` (what a wrong gradient looks like), `judgement.py` (the table).
"""
