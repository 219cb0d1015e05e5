"""What the benchmarks share: they start and time ranks, and make tables, plots and files of the results."""
