"""From committed slots to files in a directory.

In come committed slots; out come files in a directory or bucket, as HDF5 or PyTorch DCP. There is one file for each
rank (`file_index`), and one that commits them and says what all ranks hold (`rank_table`). This room imports `storage`,
and `redundancy` for slots whose shares are in other files.
"""
