"""CUDA kernels and, in `reference`, the pure-torch operations that specify them and run on CPU."""
