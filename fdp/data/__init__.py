"""The order of the data, a DataLoader of it, and the next batches ahead of time.

It imports `_execution`, `_placement` and `_trees`. Users find it as `fdp.Batches` and `fdp.prefetch`.
"""
