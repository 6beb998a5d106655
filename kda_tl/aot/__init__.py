"""Kernels ahead of time: which ones calls will launch, built on a machine with nvcc and without a GPU, as a bundle."""
