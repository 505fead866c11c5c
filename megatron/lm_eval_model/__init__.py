"""Checkpoints as a model of lm-evaluation-harness: `pip install .[lm-eval]`.

Importing `megatron.lm_eval_model.model` registers it as "megatron". The harness' own command does not import packages
that it does not know, so `python -m megatron.lm_eval_model` (installed: `megatron-lm-eval`) is its command with the
model registered.
"""
