"""Norms before the output projections of attention and MLP (sub-LN, arXiv 2210.06423), as in BitNet b1.58. The
extension is enabled by --attention-module normed_output_attention and --activation-func normed_squared_reglu.

The implementation is in `inner_norms.py`.
"""
