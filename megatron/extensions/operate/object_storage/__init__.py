"""Support for checkpoints, data sets, metrics, events and exports in object storage, at s3://, gs://, az:// and other
URLs that fsspec supports.

Flags: --storage-retry-seconds, --storage-timeout-seconds, --storage-part-megabytes, --storage-bandwidth-megabytes;
--storage-cache, --storage-cache-gigabytes, --storage-read-ahead-megabytes; --save-local, --save-local-interval,
--save-local-keep. Read `fsspec_storage.py` first, and `s3_requests.py` after that. `block_cache.py` and `read_ahead.py`
are for data sets. `two_tiers.py` uploads local checkpoints. To use a URL, install the extra [remote], or the fsspec
package for the scheme of the URL.
"""
