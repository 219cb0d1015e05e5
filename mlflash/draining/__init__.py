"""From committed slots to files in a directory, and back.

In come committed slots; out go files in a directory or bucket, and what is read of them again. It imports `storage`,
`recovery` for slots that are open to be read, and `saving` for the commits that it follows.
"""
