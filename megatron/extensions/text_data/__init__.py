"""Text as it lies around: documents of JSON lines, JSON arrays, plain text, CSV, Parquet and Arrow, local or remote."""
