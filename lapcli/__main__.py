"""`python -m lapcli` is `lap`; torchrun starts its workers this way."""

import signal


def main() -> None:
    """Run `lap`. Until the commands are imported, Ctrl-C ends the process at once: there is nothing to report yet."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not ignored, as under nohup
    if is_usual:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from lapcli.cli import main as run_command

    if is_usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run_command()


if __name__ == "__main__":
    main()
