"""Runs on several hosts, some of which may be lost: heartbeats between hosts, a rendezvous for elastic restarts, and a
lease on the --save folder.

Flags: --host-heartbeat-timeout-seconds, --trigger-path, --kill-switch-path. scripts/train_gpt_elastic.sh starts ranks
with the module `torchrun` of this package.

Read `host_watch` first: the part of a rank's watchdog that starts the host's `heartbeat`, a separate process, and ends
the rank when other hosts are lost. `save_lease` lets only one of two runs, or of two halves of a run, save to a folder.
`save_folder` checks that all hosts see the folder, and looks in it for files that stop the run.
"""
