"""Further optimizers: Muon, which orthogonalizes whole matrices; SOAP, Adam in rotated coordinates; QK-clip; Adam with
states in fewer bits than fp32; learning rates and weight decays of parameters by name, and frozen ones.

Flags: `--optimizer muon`, `--muon-*`, `--moe-router-skip-muon`; `--optimizer soap`, `--soap-*`; `--qk-clip*`;
`--use-precision-aware-optimizer` and the formats of its states; `--param-group`, `--freeze`. Read `muon.py` first, then
`megatron/core/optimizer/matrix_plan.py`, which decides who orthogonalizes which matrix.
"""
