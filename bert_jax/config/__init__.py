"""Settings of a run: the schema, its checks, named sizes, and the command line."""
