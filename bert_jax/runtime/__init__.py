"""What a run stands on: devices, meshes, processes, signals, progress."""
