"""Sharded checkpoints that load under any layout. `state_dict` defines the content of a checkpoint, and `storage`
defines the format."""
