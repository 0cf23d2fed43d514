"""For all tests: properties are judged by what they find, not by how long a busy machine takes."""

import os
from pathlib import Path

from hypothesis import settings

if not Path("/dev/nvidiactl").exists():
    # Kernels are decorated when they are imported: without a GPU, for Triton's interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("pdfleet", deadline=None)
settings.load_profile("pdfleet")
