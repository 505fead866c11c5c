"""Overlap of a layer's collectives with its GEMMs (--tp-comm-overlap).

Read `comm_overlap.py`: linear layers that send or receive part by part while they multiply.
"""
