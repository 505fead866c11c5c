"""What keeps a long run going: lost hosts, deletion of older checkpoints."""
