"""Stock formats: a checkpoint as files that its readers open without mlflash, and back.

In come checkpoints of memory or a directory, every tensor whole; out go files. It imports `storage`, `draining` and
`restoring`.

`storage.whole_state` defines the checkpoint that an exporter gets. `formulas` and `mapping` define how tensors change
on their way out, and `outputs` reads them a batch at a time. Each format is one module: `safetensors_files`,
`torch_file`, `hdf5_file`, `dcp_directory`.
"""
