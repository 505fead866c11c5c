"""Comparison of another program's loss and gradients with those of this program, tensor by tensor (`tools/referee.py`).
To read the code, start with `reference.py`, which computes loss and gradients in fp64 in one process. `dumps.py` reads
the other program's gradients, `attribution.py` explains a wrong gradient, and `judgement.py` judges all gradients.
"""
