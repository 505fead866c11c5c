"""Checkpoints, data sets, metrics, events and exports in object storage: s3://, gs://, az:// and other URLs of fsspec.

Flags: --storage-retry-seconds, --storage-timeout-seconds, --storage-part-megabytes, --storage-bandwidth-megabytes;
--storage-cache, --storage-cache-gigabytes, --storage-read-ahead-megabytes; --save-local, --save-local-interval,
--save-local-keep. Read `fsspec_storage.py`, then `s3_requests.py`. `block_cache.py` and `read_ahead.py` are for data
sets, and `two_tiers.py` uploads local checkpoints. URLs need the extra [remote], or the fsspec package for their
scheme.
"""
