"""Flags of a model that trains in a moment on the CPU. Later flags on a command line override these flags."""

TINY = (
    "--cpu --num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 50 --mock-data "
    "--lr 1e-2 --make-vocab-size-divisible-by 8 --global-batch-size 4 --train-iters 4 --eval-iters 0 --num-workers 0 "
)
