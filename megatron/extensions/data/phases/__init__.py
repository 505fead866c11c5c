"""Run phases: data, sequence lengths, batch sizes, positions and learning rates that change during a run
(--data-phases).

Read `phase_file` first for the format of the --data-phases file. `file_phase` computes the sample at which each phase
begins. `plan` provides the phases and their learning rates to `megatron.core` and `megatron.training`. `rules`
validates a file, and checks that a resumed run does not change phases that have begun. `phased_dataset` maps the run's
sample numbers to the data sets of its phases, and `phase_change` switches a run to its next phase. `batch_schedule`
changes the batch size without phases (--rampup-batch-size, --step-batch-size-schedule), and `epochs` counts the epochs
over each data set.
"""
