"""Starts each of the two ranks; rounds.py is what they do.

Some libraries start processes that import this file again. These must not import MPI, because they cannot have it.
"""

if __name__ == "__main__":
    from rounds import main

    main()
