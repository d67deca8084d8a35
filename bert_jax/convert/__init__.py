"""Models of other libraries: open, import and export them."""
