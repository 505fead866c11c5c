"""Context parallelism: sequences cut over ranks, and attention across the cuts."""
