"""Planner: the memory, FLOPs and step time of a layout, measured on fake tensors without a GPU.

Options: --dry-run, --device, --gpus-per-node, --suggest, --rehearse, --ranks, --device-memory, --json. It also counts
the FLOPs for MFU. When a device runs out of memory, it reports a change that would have fitted.

Read first: `commands` (options and their commands), `fake_stage` (one stage on fake tensors, the basis of all
measurements), `dry_run.plan`, `time.step_time`, `suggest.search`, `rehearsal.command`.
"""
