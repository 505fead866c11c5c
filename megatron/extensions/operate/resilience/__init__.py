"""Fault tolerance of multi-host runs: heartbeats between hosts, a rendezvous for elastic restarts, and a lease on the
--save folder.

Flags: --host-heartbeat-timeout-seconds, --trigger-path, --kill-switch-path. scripts/train_gpt_elastic.sh launches ranks
with this package's module `torchrun`.

Read `host_watch` first. `host_watch` starts the process `heartbeat` on each host, which exchanges messages with other
hosts. If other hosts are lost, `host_watch` ends the rank. `save_lease` ensures that only one run saves to a folder,
even if the network splits a run into two halves. `save_folder` checks that all hosts see the same folder, and looks in
the folder for files that stop the run.
"""
