"""``python -m covey`` is the command line."""

from covey.cli import main

if __name__ == "__main__":
    main()
