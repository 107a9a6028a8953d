"""What a model takes on meshes of GPUs that are not at hand: memory, bytes on links and time, out of the cost model."""
