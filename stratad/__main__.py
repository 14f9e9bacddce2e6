"""``stratad`` and ``python -m stratad``: start the daemon.

Exit status: 0 after a graceful stop, 1 it could not start, 2 bad configuration (also a state directory with another key
than that of the images which are there), 3 the instance is served already.
"""

import logging
import os
import sys

from ipc.logs import setup_logs
from stratad.config import ConfigError, load_config, render_config
from stratad.daemon import ForeignKey, run
from stratad.lock import InstanceLocked
from stratad.notify import Notifier


def main() -> int:
    """Entry point of the daemon."""
    _fill_standard_descriptors()
    try:
        config = load_config(sys.argv[1:], os.environ)
    except ConfigError as exc:
        print(f"stratad: {exc}", file=sys.stderr)
        return 2
    if config.print_config:
        sys.stdout.write(render_config(config))
        return 0
    sink = setup_logs(config.log.level, config.log.format)
    log = logging.getLogger("stratad")
    notifier = Notifier.take(os.environ, os.getpid())
    try:
        return run(config, notifier)
    except InstanceLocked as exc:
        log.error("%s", exc)
        notifier.failed(str(exc))
        return 3
    except ForeignKey as exc:  # a start again would not mend it
        log.error("cannot start: %s", exc)
        notifier.failed(str(exc))
        return 2
    except (OSError, ValueError) as exc:
        log.error("cannot start: %s", exc)
        notifier.failed(str(exc))
        return 1
    finally:
        notifier.close()
        sink.flush()


def _fill_standard_descriptors() -> None:
    """Descriptors 0 to 2 that are closed lead nowhere: else the next socket would be one of them, and be logged to."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)  # the template and its workers need them as well
    os.close(opened)


if __name__ == "__main__":
    sys.exit(main())
