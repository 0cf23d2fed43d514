"""For all tests: properties are judged by what they find, not by how long a busy machine takes."""

import os
import signal
from pathlib import Path

from hypothesis import settings

if not Path("/dev/nvidiactl").exists():
    # Kernels are decorated when they are imported: without a GPU, for Triton's interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts the suite in its background ignores it, and so would all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples every time: what fails here fails at everybody's. New ones: `--hypothesis-profile=search`.
settings.register_profile("pdfleet", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("pdfleet")
