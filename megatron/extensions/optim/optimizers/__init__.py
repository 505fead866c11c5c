"""Additional optimizers: Muon, SOAP, QK-clip, low-precision Adam states, and per-parameter settings.

Muon orthogonalizes the update of each matrix. SOAP applies Adam in an eigenbasis for each matrix. Parameters that are
selected by name can have different learning rates and weight decays, or can be frozen. Flags: `--optimizer muon`,
`--muon-*`, `--moe-router-skip-muon`; `--optimizer soap`, `--soap-*`; `--qk-clip*`; `--use-precision-aware-optimizer`
and its state format flags; `--param-group`, `--freeze`. Read `muon.py` first, then
`megatron/core/optimizer/matrix_plan.py`, which assigns matrices to the ranks that orthogonalize them.
"""
