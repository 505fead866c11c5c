"""Copies of the training state in the memory of other hosts. A restart resumes from the copies, and loses only the
steps since the last copy.

Flags: --peer-copies, --peer-copy-interval, --peer-copy-bandwidth, --peer-copy-path, --peer-copy-keep-minutes.

Read `placement` first: it determines which hosts hold a copy of each part of the training state. `shards` divides the
state into parts, and `copies` stores and sends them. `holder` is a process on each host that outlives the ranks and
serves the copies. `sets` finds the newest step for which all parts have a copy. `idle_hosts` finds copies on hosts
without ranks. `memory_checkpoint` loads copies. `hooks` contains the callback.
"""
