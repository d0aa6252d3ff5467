"""`python -m loadmaster.cli`: the command line."""

from loadmaster.cli.app import main

if __name__ == "__main__":
    main()
