"""The training step, its optimizer, evaluation and logs."""
