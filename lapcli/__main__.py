"""`python -m lapcli` is `lap`; torchrun starts its workers so."""

from lapcli.cli import main

if __name__ == "__main__":
    main()
