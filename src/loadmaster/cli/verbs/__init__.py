"""One file is one verb: its options, its call into the api, its output. `cli.commands` registers them. A verb
imports heavy packages inside its function, so that `--help` stays quick.
"""
