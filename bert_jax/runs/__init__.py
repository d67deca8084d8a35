"""What a run leaves: its workdir and its checkpoints."""
