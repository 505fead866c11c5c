"""xIELU, an activation function with two trainable scalars, as in Apertus. The extension is enabled by
`--activation-func xielu`. The implementation is in `xielu.py`."""
