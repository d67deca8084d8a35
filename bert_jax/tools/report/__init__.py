"""What people look at: pictures and pages of runs, tables of experiments."""
