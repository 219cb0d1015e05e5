"""Stock formats: a checkpoint is written to files that other programs open without mlflash, and read from such files.

In come checkpoints in memory or in a directory, with every tensor whole, and out go files. This room imports `storage`,
`draining` and `restoring`.

`open_whole` makes the checkpoint that an exporter gets, a `storage.whole_state.Whole`, and selects
and renames its tensors. `safetensors_files` and `formats` write files. `imports` reads DCP directories and
safetensors.
"""
