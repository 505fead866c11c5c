"""Comparison of another program's loss and gradients with this program's, tensor by tensor (`tools/referee.py`).

Start with `reference.py` (loss and gradients in fp64, in one process), then `dumps.py` (reads the other program's
gradients), `attribution.py` (explains a wrong gradient) and `judgement.py` (the table).
"""
