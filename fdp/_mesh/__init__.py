"""The same over processes: what they say to each other, and the part that each has in a call.

Between `_execution` and `_collectives`: `distributed` makes meshes, and everything that runs on one comes here.
"""
