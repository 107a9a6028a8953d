"""Where the tensors of a step lie in its arena."""
