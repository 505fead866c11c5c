"""SwiGLU with scale factors for gates and outputs, as in Falcon-H1. The flags are `--activation-func scaled_swiglu` and
`--swiglu-multipliers`. The implementation is in `scaled_swiglu.py`."""
