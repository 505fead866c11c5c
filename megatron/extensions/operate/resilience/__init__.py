"""Runs on several hosts of which some may be lost: heartbeats between hosts, a rendezvous for elastic restarts, and a
lease on the --save folder.

Flags: --host-heartbeat-timeout-seconds, --trigger-path, --kill-switch-path. scripts/train_gpt_elastic.sh starts ranks
by `torchrun`, the module here.

Read `host_watch` first: the part of a rank's watchdog that starts the host's `heartbeat`, a process of its own, and
ends the rank when other hosts are lost. `save_lease` lets only one of two runs, or halves of one, save to a folder.
`save_folder` checks that all hosts see it, and looks for files in it that stop the run.
"""
