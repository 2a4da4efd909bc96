"""`python -m memplan`: the same commands as `memplan`."""

from memplan.cli import main

if __name__ == "__main__":
    main()
