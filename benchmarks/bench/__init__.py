"""The code that all benchmarks share. It starts and times ranks, and makes tables, plots and files of the results."""
