"""Planner: the memory, FLOPs and step time of a layout, measured on fake tensors without a GPU.

Options: --dry-run, --device, --gpus-per-node, --suggest, --rehearse, --ranks, --device-memory, --json. The planner also
counts the FLOPs for MFU. When a device runs out of memory, the planner reports a change with which the run would have
fitted.

Read first: `commands` (options and their commands), `fake_stage` (one stage on fake tensors, the basis of all
measurements), `dry_run.plan`, `time.step_time`, `suggest.search`, `rehearsal.command`.
"""
