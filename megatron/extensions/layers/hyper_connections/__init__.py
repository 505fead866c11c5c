"""Several residual streams: manifold-constrained hyper-connections (mHC), as in DeepSeek-V4.

The extension is enabled by --enable-mhc-connections. Flags: --mhc-num-residual-streams, --mhc-sinkhorn-iterations,
--mhc-init-gating-factor, --mhc-epsilon and --mhc-output-contract. With --recompute-modules mhc, the streams are saved
once per layer instead of once per sublayer.

Read `hyper_connection.py` first, which contains the module. `mixing.py` contains the formulas.
"""
