"""Bytes, times, counts and lists as people write and read them.

In come numbers, names and words; out come words and numbers. It imports only `errors`.
"""
