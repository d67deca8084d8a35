"""From text to documents, rows and batches."""
