"""Copies of the training state in the memory of other hosts. A restart resumes from them, and loses only the steps
since the last copy.

Flags: --peer-copies, --peer-copy-interval, --peer-copy-bandwidth, --peer-copy-path, --peer-copy-keep-minutes.

Read `placement` first, which decides which hosts hold a copy of which part. `shards` divides the state into parts, and
`copies` stores and sends them. `holder` is a process on each host that outlives the ranks and serves the copies. `sets`
finds the newest complete step, `idle_hosts` finds copies on hosts without ranks, and `memory_checkpoint` loads them.
`hooks` contains the callbacks.
"""
