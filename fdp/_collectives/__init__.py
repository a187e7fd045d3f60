"""What slots do together: collectives, where they meet, who has a turn, and how gradients go back through them.

It imports the rooms below. `run` is the way in for the rooms above: it runs the shards of a call
and finds out by itself whether they meet.
"""
