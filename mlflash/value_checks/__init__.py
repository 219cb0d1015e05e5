"""Bytes that are saved → tensors whose values no training continues from: NaN, infinities, zeros, absurdly large ones.

In come a slot and the tensors in it; out come findings. A rank does it alone. This room imports `memory` and `state`.
`float_formats` finds the largest value of any dtype in bytes, `checked_parts` says which bytes belong to which tensor,
and `examiner` compares them with what the same bytes held before.
"""
