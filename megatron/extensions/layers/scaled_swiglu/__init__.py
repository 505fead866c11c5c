"""SwiGLU with scale factors for gates and outputs, as in Falcon-H1. The flags are `--activation-func scaled_swiglu` and
`--swiglu-multipliers`. Read `scaled_swiglu.py`."""
