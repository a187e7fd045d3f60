"""The functions that users call on functions: `dp_apply`, `shard_map`, `parallel_apply`, gradients and `explain`.

It imports `_collectives`, `_rows`, `_execution`, `_placement` and `_trees`. `nn` stands above it.
"""
