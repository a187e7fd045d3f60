"""What slots do together: collectives, where they meet, and how gradients go back through them.

It imports `_execution`, `_placement` and `_trees`. The rooms above run shards without it: slots find the way to it when
they call a collective.
"""
