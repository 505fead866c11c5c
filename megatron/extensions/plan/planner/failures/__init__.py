"""What failures cost a run: expected goodput, the best interval of saves, and spare nodes."""
