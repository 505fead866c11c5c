"""xIELU, an activation function with two trainable scalars, as in Apertus. Enabled by `--activation-func xielu`. The
implementation is in `xielu.py`."""
