"""Checkpoints, metrics, events and exports in object storage: s3://, gs://, az:// and other URLs of fsspec.

Flags: --storage-retry-seconds, --storage-timeout-seconds, --storage-part-megabytes, --storage-bandwidth-megabytes. Read
`fsspec_storage.py`, then `s3_requests.py`. Needs the extra [remote], or fsspec's package for the scheme.
"""
