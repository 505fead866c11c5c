"""Sharded checkpoints that load at any layout: `state_dict` defines what is saved, `storage` how."""
