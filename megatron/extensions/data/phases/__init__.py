"""Phases of a run: data, sequence lengths, batch sizes, positions and learning rates that change during the run
(--data-phases).

Read `phase_file` first for the format of the --data-phases file, then `file_phase` for the beginnings of its phases,
and `plan` for the interface to the trunk and for learning rates. `rules` validates a file, and checks what a resumed
run must not change. `phased_dataset` numbers the samples of all phases, and `phase_change` moves a run to its next
phase. `batch_schedule` changes the batch size without phases (--rampup-batch-size, --step-batch-size-schedule), and
`epochs` counts the epochs over each data set.
"""
