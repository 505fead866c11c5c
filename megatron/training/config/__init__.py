"""From a command line to a validated configuration. No torch."""
