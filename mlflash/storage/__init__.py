"""Directories, buckets, and the formats of the files in them.

In come bytes and paths or URLs, and out come files that PyTorch opens without mlflash. `store` writes and reads files,
and `many_files` makes it do so with thousands at a time. Signed documents need `canonical_json` and `signatures`.
`other_formats` recognizes the checkpoints of other libraries. The other modules define how a format wraps tensors. This
room imports `state`.
"""
