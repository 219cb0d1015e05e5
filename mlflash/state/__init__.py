"""Takes the nested state of a training apart, so that it can be written to a slot, and puts it together again.

In come dicts, lists, tensors, arrays, plain values and objects with `state_dict`, and out come three things: leaves
with names, the place of each leaf in a slot (`layout`), and the `manifest`, which says how to put them together again.
Nothing here knows about nodes, files or MPI.
"""
