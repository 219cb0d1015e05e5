"""Stock formats: a checkpoint as files that its readers open without mlflash, and back.

In come checkpoints of memory or a directory, every tensor whole; out go files. It imports `storage`, `draining` and
`restoring`.

`storage.whole_state` says what an exporter is given, `formulas` and `mapping` what becomes of its tensors on the way
out, `outputs` reads them a batch at a time. Each format is one module: `safetensors_files`, `torch_file`,
`dcp_directory`.
"""
