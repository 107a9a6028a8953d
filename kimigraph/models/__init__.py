"""Models written here in plain PyTorch, a package each; ``kimigraph.capture`` finds them by model type."""
