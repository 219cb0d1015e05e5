"""Bytes that are saved → tensors whose values no training goes on from: NaN, infinities, zeros, absurdly large ones.

`float_formats` finds the largest value of any dtype in bytes, `checked_parts` says which bytes are which tensor's, and
`examiner` compares them with what the same bytes held before.
"""
