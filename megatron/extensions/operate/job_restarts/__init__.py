"""Restarts of failed ranks within the launcher's processes, so that the launcher does not see the failure.

Flags: --restarts-in-job, --spare-ranks.

Read `restarts` first: each process of the launcher becomes a parent, which forks its rank. `parents` has the messages
between parents, with which they agree on the next start. `roster` assigns ranks to parents.
"""
