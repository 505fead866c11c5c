"""Phases of a run: data, lengths, batch sizes, positions and learning rates that change within it (--data-phases).

Read `phase_file` for what the file of --data-phases says, then `plan` for where its phases begin. `rules` judges both,
and what a resumed run may not change; `schedule` has the learning rates; `phase_change` takes a run to its next phase.
"""
