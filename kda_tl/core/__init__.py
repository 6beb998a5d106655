"""The words of the library: problems, devices, chunks, stages, pipelines, plans. Frozen data and functions."""
