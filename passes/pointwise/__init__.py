"""Parts of the ``fuse-pointwise`` pass."""
