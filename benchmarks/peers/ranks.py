"""Starts each of the two ranks. The work is in rounds.py.

Some libraries start processes that import this file again. Such a process must not import MPI, because MPI cannot start
in it.
"""

if __name__ == "__main__":
    from rounds import main

    main()
