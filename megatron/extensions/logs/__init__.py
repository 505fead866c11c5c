"""Logs beside the console and `metrics.jsonl`: TensorBoard, Weights & Biases, and the lines of Megatron-LM.

Flags: --tensorboard-dir, --wandb-project and its kin, --log-format megatron, --log-throughput.

Read `flags` first. `dashboards` has the sinks of records, `megatron_tags` the names of their values, `megatron_lines`
the format of the console's lines.
"""
