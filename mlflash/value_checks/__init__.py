"""Finds values in a save from which no training continues: NaN, infinities, zeros, absurdly large values.

In come a slot and the tensors in it, and out come findings. Each rank does this alone. This room imports `memory` and
`state`.
"""
