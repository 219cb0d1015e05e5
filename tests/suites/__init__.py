"""The checkpoint tests of other projects, with parts of mlflash in the place of theirs: ``make suites SRC=dir``.

    suite       what is said of a suite, and where its checkout is
    nvrx, megatron, pytorch, trainer   one suite each: what is put in whose place
    dcp_parts   what stands in the place of PyTorch's FileSystemWriter and FileSystemReader
    session     pytest on one rank, with the parts in their places
    outcomes    what became of each test, written by each rank as it goes, and read of all of them
    verdict     which failures are expected (``NAME.txt``, a line for each), what is not as expected, and the table
    run         runs the suites, prints the table, and fails where something is not as expected

Nothing of the other projects is here: the checkouts are the user's.
"""
