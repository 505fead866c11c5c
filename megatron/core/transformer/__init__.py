"""Transformer layers over tensor- and sequence-parallel linears."""
