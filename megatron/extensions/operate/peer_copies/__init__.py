"""Copies of the training state in the memory of other hosts, from which a restart resumes: at most the steps since the
last copy are lost.

Flags: --peer-copies, --peer-copy-interval, --peer-copy-bandwidth, --peer-copy-path, --peer-copy-keep-minutes.

Read `placement` first: it decides which hosts hold a copy of which part. `shards` divides the state into parts, and
`copies` stores and sends them. `holder` is a process on each host that outlives the ranks and serves the copies. `sets`
finds the newest complete step, `idle_hosts` finds copies on hosts without ranks, and `memory_checkpoint` loads them.
`hooks` has the callbacks.
"""
