"""This extension has no flags: users register their own data sets in `DATASETS`."""
