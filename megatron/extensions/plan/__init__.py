"""Tools that predict the memory, step time and loss of a training run before it starts, and that suggest its layout."""
