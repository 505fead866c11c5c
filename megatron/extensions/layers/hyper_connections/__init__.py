"""Several residual streams: manifold-constrained hyper-connections (mHC), as DeepSeek-V4 has them.

Switched on by --enable-mhc-connections, with --mhc-num-residual-streams, --mhc-sinkhorn-iterations,
--mhc-init-gating-factor, --mhc-epsilon and --mhc-output-contract. --recompute-modules mhc keeps the streams once in a
layer in place of once in a sublayer.

Read first: `hyper_connection.py`, the module; `mixing.py`, its formulas.
"""
