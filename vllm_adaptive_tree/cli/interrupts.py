"""Commands that may be stopped: by Ctrl-C, and alike by the SIGTERM of a scheduler or a container."""

import signal
import sys
from collections.abc import Callable


def interruptible(work: Callable[[], None], note: Callable[[], str]) -> int:
    """Run `work`. Returns 0, or the shell's code of the signal that interrupted it, after what `note` says."""
    number = int(signal.SIGINT)

    def stop(received: int, frame: object) -> None:
        nonlocal number
        number = received
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        work()
    except KeyboardInterrupt:
        print(f"\ninterrupted: {note()}", file=sys.stderr)
        return 128 + number
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0
