"""Stock formats: a checkpoint is written to files that other programs open without mlflash, and read from such files.

In come checkpoints in memory or in a directory, with every tensor whole, and out go files. This room imports `storage`,
`draining` and `restoring`.

`storage.whole_state` defines the checkpoint that an exporter gets. `formulas` and `mapping` define how tensors change
on their way out, and `outputs` reads them a batch at a time. Each format is one module: `safetensors_files`,
`torch_file`, `hdf5_file`, `dcp_directory`. `imports` reads DCP directories and safetensors.
"""
