"""The embedded engine on a CPU: decoder layers with kernels of our own, where there is a compiler for them."""
