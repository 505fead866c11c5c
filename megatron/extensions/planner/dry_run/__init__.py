"""The plan of a run, printed without starting it: no GPU and no process group."""
