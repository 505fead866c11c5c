"""ZeRO-2 and ZeRO-3: gradients, and parameters too, sharded over the data-parallel ranks.

They are choices of `--data-parallel-sharding-strategy`. Read `unit_sharding`.
"""
