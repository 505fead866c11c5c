"""Ladders: small runs that predict the loss of a large run, and the comparison of that run with the prediction.

`tools/ladder.py` trains and predicts; --expect compares a run. Read `rungs` for the runs, `law` for the fit, and
`prediction` for what follows from it. `expected` is the callback of --expect.
"""
