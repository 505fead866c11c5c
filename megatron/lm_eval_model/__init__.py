"""Model class for lm-evaluation-harness that evaluates checkpoints: `pip install .[lm-eval]`.

Importing `megatron.lm_eval_model.model` registers it as "megatron". The harness's own command does not import
third-party packages, so `python -m megatron.lm_eval_model` (installed: `megatron-lm-eval`) runs that command with the
model registered.
"""
