import megatron.extensions.speed.fusions.flags  # noqa: F401  (registers the fused parts, which tests build without a command line)
