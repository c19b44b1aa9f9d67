"""What surrounds a state: one owner per run, incidents, results that are being replaced.

In: who trains, and what happened. Out: records beside the state.
"""
