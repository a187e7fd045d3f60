"""Trees, and what every other room needs: types, containers, paths, tables to print, and all private names of torch.

This is the ground floor. Nothing here knows of devices, slots or threads. It imports no other room, and it is the only
one that imports optree.
"""
