"""Directories, buckets, and the formats of the files that lie there.

In come bytes and paths or URLs; out come files that PyTorch opens without mlflash. A store writes and reads (`store`;
`many_files` has it do so with thousands); `canonical_json` and `signatures` are for what is signed; the other modules
say how a format wraps tensors. It imports `state`.
"""
