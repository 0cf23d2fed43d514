"""Triton kernels for Hopper and later, plain functions over tensors, and what they compute in torch."""
