"""Finds values in a save from which no training continues: NaN, infinities, zeros, absurdly large values.

In come a slot and the tensors in it, and out come findings. Each rank does this alone. This room imports `memory` and
`state`.

`float_formats` finds the largest value of any dtype in bytes. `checked_parts` says which bytes belong to which tensor.
`examiner` compares the values with those of the saves before.
"""
