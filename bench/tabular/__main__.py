"""``python -m bench.tabular``."""

from bench.tabular import main

if __name__ == "__main__":
    main()
