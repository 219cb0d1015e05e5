"""Bytes, times, counts and lists as people write and read them.

In come numbers, names and words, and out come words and numbers. Every room may import this one, which imports only
`errors`.
"""
