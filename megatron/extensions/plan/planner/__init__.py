"""Plans of runs: what a layout holds in memory, computes and takes in time, found out on fake tensors without a GPU.

Options: --dry-run, --device, --gpus-per-node, --suggest, --rehearse, --ranks, --device-memory, --json. It also counts
the FLOPs of MFU, and says what would have fitted when a device runs out of memory.

Read first: `commands` (what the options ask for), `fake_stage` (one stage on fake tensors, which everything is measured
on), `dry_run.plan`, `time.step_time`, `suggest.search`, `rehearsal.command`.
"""
