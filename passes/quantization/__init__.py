"""What ``insert-quantization`` is made of: who uses a cache, the rewrite of a unit, the form of the call."""
