"""Data sets in the formats of `datasets`, `webdataset` and `mosaicml-streaming`, as values of --data-path.

Each is read by its own library, an extra of the package that is imported when it is used. Read `documents` for what a
library has to say, `hugging_face`, `web_shards` and `mosaic` for the three, then `tokenized_source` for the indexed
dataset that their documents become: order, packing, resuming and blends are those of any indexed dataset.
"""
