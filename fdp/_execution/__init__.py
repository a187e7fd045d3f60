"""How shards run: in order, or in threads that stay, with the thread-local state and random numbers of the caller.

It imports `_placement` and `_trees`. It knows nothing of what slots do together: that is `_collectives`.
"""
