"""Triton kernels and what launches them. Importing this package imports no Triton."""
