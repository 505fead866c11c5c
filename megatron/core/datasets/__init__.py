"""Token datasets: Megatron's files on disk and Megatron's sample order, in numpy alone.

`indexed_dataset` reads and writes `.bin/.idx` pairs, `indices` decides the order of samples, `gpt_dataset` and
`blended` are the datasets, `build` makes those of a run, `samplers` hands each data-parallel rank its batches.
Only `samplers` imports torch, so the data tools start fast and run without it.
"""
