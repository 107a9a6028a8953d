"""What ``split-stages`` is made of: where each value of a step is computed when stages share out its layers."""
