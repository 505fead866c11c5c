"""Model architectures built from the library's layers."""
