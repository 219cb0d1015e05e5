"""What is committed in the memory of any node → whole and verified where it is read.

In comes what the nodes hold; out come slots of which every byte was checked: found, fetched, rebuilt from parity,
gathered from shares; and redundancy that was lost is made again. It imports `runtime`.
"""
