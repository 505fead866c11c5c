"""Bf16 GEMMs that add partial sums in fp32 on GPUs: `--disable-bf16-reduced-precision-matmul`. Read `hooks.py`."""
