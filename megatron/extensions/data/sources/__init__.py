"""Support in --data-path for data sets in the formats of `datasets`, `webdataset` and `mosaicml-streaming`.

Each format is read by its own library. The libraries are optional dependencies (extras), and are imported on first use.
The module `documents` defines the common interface. The modules `hugging_face`, `web_shards` and `mosaic` implement
this interface for the three formats. `tokenized_source` converts documents to an indexed dataset, so that order,
packing, resuming and blends work as for any indexed dataset.
"""
