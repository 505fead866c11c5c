"""Downstream tasks in lm-evaluation-harness' YAML form, run on the training model at any layout (--eval-tasks).

`task_file` and `groups` read the files, `documents` their data, `templates` and `prompts` make requests of documents,
`tokens` rows of tokens, `scoring` runs the rows through the pipeline, `generation` continues prompts, `metrics` and
`filters` turn results into scores, and `in_loop` does all of it within a run.
"""
