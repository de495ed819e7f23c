"""Dumps that stay where they are: `s3://`, `gs://` and `http(s)://`, read by ranges into a cache of blocks."""
