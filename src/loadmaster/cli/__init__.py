"""The command line: `app.main` is the entry point, and the one place where errors become messages and exit
codes. One file in `verbs` is one verb, a thin call into the api. It may import everything; nothing imports
it.
"""
