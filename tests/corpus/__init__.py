"""Kernels in the styles that programs write them in, for whatever has to hold of any kernel."""
