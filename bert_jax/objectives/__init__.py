"""What a model learns: loss terms, targets and predictions of each objective."""
