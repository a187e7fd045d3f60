"""What slots do together: collectives, where they meet, and how gradients go back through them.

It imports `_execution`, `_placement` and `_trees`. `run` is the way in for the rooms above: it runs the shards of a
call and finds out by itself whether they meet.
"""
