"""Phases of a run: data, lengths, batch sizes, positions and learning rates that change within it (--data-phases).

Read `phase_file` for what the file of --data-phases says, then `file_phase` for where its phases begin, and `plan` for
how the trunk asks for them, and for the learning rates. `rules` judges a file, and what a resumed run may not change.
`phased_dataset` numbers the samples of all phases, and `phase_change` takes a run to its next phase. `batch_schedule`
changes the batch size without phases (--rampup-batch-size, --step-batch-size-schedule), and `epochs` counts those over
each data set.
"""
