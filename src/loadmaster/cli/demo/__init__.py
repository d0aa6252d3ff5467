"""What `loadmaster demo` shows after its plan: a plan trained on parts of this machine, then a model larger
than its memory. The verb itself plans. It may import what verbs may, and verbs whose tables it shows.
"""
