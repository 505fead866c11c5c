"""xIELU, an activation function with two trainable scalars (Apertus): `--activation-func xielu`. Read `xielu.py`."""
