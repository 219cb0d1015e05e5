"""From committed slots to files in a directory.

In come committed slots; out go files in a directory or bucket, of HDF5 or PyTorch DCP: one for each rank
(`file_index`), and one that commits them and says what all ranks hold (`rank_table`). It imports `storage`, and
`redundancy` for slots whose shares lie in other files.
"""
