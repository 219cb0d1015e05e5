"""A training's nested state ↔ its leaves ↔ the bytes of a slot.

In come dicts, lists, tensors, arrays, plain values and objects with `state_dict`; out come leaves with names, the place
of each in a slot (`layout`), and the manifest that puts them together again. This room knows nothing about nodes, files
or MPI, and imports only `errors`.
"""
