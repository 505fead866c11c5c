"""Additional optimizers: Muon, SOAP, QK-clip, low-precision Adam states, and per-parameter settings.

Muon orthogonalizes the update of each matrix. SOAP applies Adam in the eigenbasis of each matrix. Parameters can be
selected by name to have their own learning rates and weight decays, or to be frozen. Flags: `--optimizer muon`,
`--muon-*`, `--moe-router-skip-muon`; `--optimizer soap`, `--soap-*`; `--qk-clip*`; `--use-precision-aware-optimizer`
and its state format flags; `--param-group`, `--freeze`. Start with `muon.py`, then read
`megatron/core/optimizer/matrix_plan.py`, which assigns matrices to the ranks that orthogonalize them.
"""
