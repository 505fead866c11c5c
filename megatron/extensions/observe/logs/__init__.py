"""Logs beside the console and `metrics.jsonl`: TensorBoard, Weights & Biases, Prometheus, samples, losses, sums.

Flags: --tensorboard-dir, --wandb-project and related flags, --prometheus-port, --sample-log, --log-source-loss,
--log-params-norm, --log-num-zeros-in-grad, --log-format megatron, --log-throughput.

Read `flags` first. `dashboards` and `prometheus` have the sinks of records, `megatron_format` the names of their values
and the console's lines as Megatron-LM has them, `terminal` those that fit into a terminal. `meters` has losses of data
sets, the norm of the parameters, zeros in the gradient, and the samples of each step.
"""
