"""``python -m sky_monarch``: the command line."""

from sky_monarch.cli import main

if __name__ == "__main__":
    main()
