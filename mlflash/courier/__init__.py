"""How a trainer reaches its courier, and what the courier knows.

In the trainer, `connection` keeps one `link` to a courier for each set of ranks, and starts the courier anew if it has
ended. Each end of the `channel` calls methods at the other end (`client`). `records` and `ranks` have what the calls
carry. In the courier, `start` connects the ranks and finds what earlier runs left (`choose_checkpoint`), and makes the
`state` of the courier, with which commits, drains and restores work.
"""
