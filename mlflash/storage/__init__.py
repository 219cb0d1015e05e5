"""Directories, buckets, and the formats of the files in them.

In come bytes and paths or URLs; out come files that PyTorch opens without mlflash. A store writes and reads (`store`;
`many_files` makes it do so with thousands). `canonical_json` and `signatures` are for what is signed. The other modules
know how a format wraps tensors. This room imports `state`.
"""
