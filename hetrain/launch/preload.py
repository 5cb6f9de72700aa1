"""Imported once by the server that local worker processes are forked from, so that they share the slow imports.

A stop signal sent to the whole process group must not end this server: workers save and exit on their own.
"""

import contextlib
import os
import signal

from hetrain.launch.orphans import end_with_parent
from hetrain.launch.quiet import quiet_third_parties

end_with_parent()  # workers are this server's children and end with it in turn
with contextlib.suppress(PermissionError):
    os.setsid()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
quiet_third_parties()
with contextlib.suppress(Exception):  # the worker imports the same and reports what went wrong
    import hetrain.build
    import hetrain.engine.store_engine
    import hetrain.launch.process  # noqa: F401
