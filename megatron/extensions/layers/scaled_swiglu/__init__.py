"""SwiGLU with factors of its gates and outputs, as Falcon-H1 has it: `--activation-func scaled_swiglu` and
`--swiglu-multipliers`. Read `scaled_swiglu.py`."""
