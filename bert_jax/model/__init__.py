"""The encoder, its heads, and their costs."""
