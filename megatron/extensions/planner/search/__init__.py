"""Search for the layouts of a model that take the least time and fit the memory of the devices."""
