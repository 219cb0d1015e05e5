"""A training's nested state ↔ its leaves ↔ the bytes of a slot.

In come dicts, lists, tensors, arrays, plain values and objects with `state_dict`; out go leaves with names, where each
lies in a slot (`layout`), and the manifest that puts them together again. It knows nothing of nodes, files or MPI, and
imports only `errors`.
"""
