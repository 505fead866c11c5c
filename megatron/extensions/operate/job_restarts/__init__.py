"""Restarts of failed ranks within the launcher's processes, so that the launcher does not notice the failure.

Flags: --restarts-in-job, --spare-ranks.

Read `restarts` first. Each process that the launcher starts is a parent: it forks a child process, which trains as a
rank. `parents` implements the messages with which parents agree on when and how to launch the ranks again. `roster`
assigns ranks to parents.
"""
