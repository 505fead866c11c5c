"""Restarts of failed ranks within the processes of the launcher, which does not see the failure.

Flags: --restarts-in-job, --spare-ranks.

Read `restarts` first: a parent for each process of the launcher, which forks its rank. `parents` is what they tell each
other, and how they agree on the next start. `roster` says which of them play which ranks.
"""
