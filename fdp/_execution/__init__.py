"""How shards run: in order, or side by side in threads, with the thread-local state and random numbers of the caller.

Here is also whose turn it is where threads wait for each other. It imports `_placement` and `_trees`. It knows nothing
of what slots do together: that is `_collectives`.
"""
