"""Ladders: sets of small runs that predict the loss of a large run.

`tools/ladder.py` trains the small runs and predicts the loss. --expect compares a run with the prediction. `rungs`
builds the runs, `law` fits the scaling law, `prediction` derives the results, and `expected` contains the callback that
implements --expect.
"""
