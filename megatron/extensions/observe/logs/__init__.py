"""Logs in TensorBoard, Weights & Biases and Prometheus, and logs of samples, of losses by document and dataset, of the
parameter norm, and of the number of zeros in the gradient.

Flags: --tensorboard-dir, --wandb-project and related flags, --prometheus-port, --sample-log, --log-source-loss,
--log-params-norm, --log-num-zeros-in-grad, --log-format megatron, --log-throughput.

Start with `flags`. `dashboards` and `prometheus` contain record sinks. `megatron_format` contains Megatron-LM's value
names and console lines. `terminal` contains the lines that fit into a terminal. `meters` measures losses by dataset,
the parameter norm, zeros in the gradient, and the samples of each step.
"""
