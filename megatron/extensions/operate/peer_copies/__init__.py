"""Copies of the training state in the memory of other hosts. A restart resumes from the copies, and loses only the
steps since the last copy.

Flags: --peer-copies, --peer-copy-interval, --peer-copy-bandwidth, --peer-copy-path, --peer-copy-keep-minutes.

Read `placement` first, which determines the hosts that hold a copy of each part. `shards` divides the state into parts,
and `copies` stores and sends them. `holder` is a process on each host that outlives the ranks and serves the copies.
`sets` finds the newest step with a complete set of copies. `idle_hosts` finds copies on hosts without ranks.
`memory_checkpoint` loads copies. `hooks` contains the callbacks.
"""
