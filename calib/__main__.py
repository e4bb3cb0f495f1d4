"""``python -m calib`` is the command line."""

from calib.cli import main

if __name__ == "__main__":
    main()
