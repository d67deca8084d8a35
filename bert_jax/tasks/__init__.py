"""Data sets to fine-tune on, with official metrics and prediction files."""
