"""The checkpoint tests of other projects, with parts of mlflash in the place of theirs: ``make suites SRC=dir``.

    suite       what is said of a suite, and where its checkout is
    nvrx, megatron, pytorch, trainer   one suite each: what is put in whose place
    dcp_parts   what stands in the place of PyTorch's FileSystemWriter and FileSystemReader
    session     pytest on one rank, with the parts in their places; writes down what becomes of each test
    verdict     what became of each test, which failures are expected (``NAME.txt``, a line for each), and the table
    run         runs the suites, prints the table, and fails where something is not as expected

Nothing of the other projects is here: the checkouts are the user's.
"""
