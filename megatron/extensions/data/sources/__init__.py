"""Data sets in the formats of `datasets`, `webdataset` and `mosaicml-streaming`, as values of --data-path.

Each format is read by its own library. The libraries are extras of the package, and are imported on first use. Read
`documents` for the common interface, `hugging_face`, `web_shards` and `mosaic` for the three formats, then
`tokenized_source`, which converts documents to an indexed dataset: order, packing, resuming and blends work as for any
indexed dataset.
"""
