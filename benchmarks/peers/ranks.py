"""Start of each of the two ranks: rounds.py holds what they do.

Some libraries start processes that import this file again: they must not import MPI, which such a process cannot have.
"""

if __name__ == "__main__":
    from rounds import main

    main()
