"""Model architectures built from the library's layers, and their exchange with other formats."""
