"""Kernels in C for a step on a CPU, compiled where they run; without a compiler there is plain torch."""
