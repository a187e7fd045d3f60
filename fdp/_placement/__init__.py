"""From trees to slots and back: devices, the plan, and the moves that carry it out.

Here is decided how many rows each slot has, which leaf is split along what, and how shards are joined again. It imports
`_trees`. What runs on a slot is the business of the rooms above.
"""
