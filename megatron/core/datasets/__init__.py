"""Token datasets with Megatron-LM's file format and sample order, in numpy.

`indexed_dataset` reads and writes `.bin/.idx` pairs. `indices` computes the order of samples. `gpt_dataset` and
`blended` define the dataset classes, and `build` creates the datasets of a run. `samplers` provides the batches of each
data-parallel rank. Only the module `samplers` imports torch, so the data tools run without torch.
"""
