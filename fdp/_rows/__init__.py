"""`randomness="rows"`: whose draw is whose, so that each row draws what it draws on one device.

It imports `_execution`, `_placement` and `_trees`. Running the function without data, to see its draws, is the business
of `_transforms`.
"""
