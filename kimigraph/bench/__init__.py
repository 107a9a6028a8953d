"""What kernels take on this machine's GPU, beside public kernels that do the same work."""
