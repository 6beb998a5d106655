"""Kernels ahead of time: built on a machine with nvcc, loaded on one without it and without TileLang."""
