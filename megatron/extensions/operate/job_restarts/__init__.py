"""Restarts of failed ranks within the launcher's processes, so that the launcher does not notice the failure.

Flags: --restarts-in-job, --spare-ranks.

Read `restarts` first: each process that the launcher starts is a parent, which forks its rank. `parents` implements the
messages with which parents agree on the next start. `roster` assigns ranks to parents.
"""
