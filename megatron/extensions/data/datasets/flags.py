"""There are no flags: data sets of a user's own are registered in `DATASETS`."""
