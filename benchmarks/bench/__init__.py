"""What the benchmarks share: how ranks are started and timed, and how tables, plots and files are made of it."""
