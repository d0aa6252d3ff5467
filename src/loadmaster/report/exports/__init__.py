"""Plans and timelines in the formats of other programs, one file each. An exporter is a function `export`
that takes a placement and its timeline and gives the bytes of a file and, in sentences, what the format
cannot express. `registry` names them.
"""
