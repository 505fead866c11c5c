"""Faults between hosts: heartbeats, and the end of ranks that have lost each other."""
