"""Sharded checkpoints that load under any layout. `state_dict` defines their content, `storage` their format."""
