"""Planner that measures the memory, FLOPs and step time of a layout on fake tensors, without a GPU.

Options: --dry-run, --device, --gpus-per-node, --suggest, --rehearse, --ranks, --device-memory, --json. The planner also
counts the FLOPs for MFU. When a device runs out of memory, the planner reports a change with which the run would have
fitted.

Start with `commands` (options and their commands) and `fake_stage` (one stage on fake tensors, the basis of all
measurements). Then read `dry_run.print_plan`, `time.step_time`, `suggest.search` and `rehearsal.command`.
"""
