"""Pages, plots and tables of runs and experiments."""
