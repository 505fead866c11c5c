"""SwiGLU with factors for its gates and outputs, as in Falcon-H1: `--activation-func scaled_swiglu` and
`--swiglu-multipliers`. Read `scaled_swiglu.py`."""
