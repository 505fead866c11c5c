"""Ladders: small runs that predict the loss of a large run, and the comparison of that run with the prediction.

`tools/ladder.py` trains and predicts; --expect compares a run. `rungs` builds the runs, `law` fits the scaling law,
`prediction` derives the results, and `expected` is the callback of --expect.
"""
