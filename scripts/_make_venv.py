"""Makes .venv from a lock: ``_make_venv.py ROOT LOCK``. Standard library only; run by scripts/_venv.

One process at a time works (the others wait for it and then find it done). The stamp is removed first and written
last, so that an environment is only ever taken for ready when it is complete.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import venv
from pathlib import Path

LOCKS = ("requirements.lock", "requirements-dev.lock")  # the second holds all of the first

# PyTorch alone, which is added to an environment. Tried in this order: the build for CPUs is a tenth of the other's
# size, but only there where pip is set up to find it.
TORCH_LOCK = "requirements-torch.lock"
TORCH_LOCKS = ("requirements-torch-cpu.lock", TORCH_LOCK)

# The runtimes that exports are tested with. DeepSpeed comes as source alone, which is built with what is there already.
RUNTIMES_LOCK = "requirements-runtimes.lock"
RUNTIMES_OPTIONS = ("--no-binary=deepspeed", "--no-build-isolation")

# In an environment made here, from the start: another one is not ours to delete.
MARK = "made-by-piper-ray"

# What pip would write for the entry point of pyproject.toml. Through sh, because a #! line cannot hold spaces: to sh
# the second line is exec, to Python it opens a string that the third closes. Processes that it starts import it anew.
COMMAND = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
from piper_ray.cli import program

if __name__ == "__main__":
    program()
"""


def main(root: Path, lock: str) -> int:
    environment = root / ".venv"
    with (root / ".venv.lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if is_ready(root, lock):
            return 0
        print(f"piper-ray: making {environment} from {lock} with Python {sys.version.split()[0]} ...", flush=True)
        (environment / f"{lock}.stamp").unlink(missing_ok=True)
        # Onto a complete runtime environment of the same versions the rest is added; anything else is made anew.
        if not is_ready(root, LOCKS[0]):
            if environment.exists() and not (environment / MARK).exists():
                print(f"piper-ray: {environment} is there but was not made by this script; please move it away.")
                return 1
            shutil.rmtree(environment, ignore_errors=True)
            environment.mkdir()
            (environment / MARK).touch()
            venv.create(environment, with_pip=True)
        python = environment / "bin" / "python"
        if not install_lock(python, root, lock):
            print(f"piper-ray: the installation failed; see pip's words above. {environment} is not complete.")
            return 1
        add_checkout(environment, root)
        # The development lock pins the versions of the runtime lock, so both are ready.
        for name in LOCKS[: LOCKS.index(lock) + 1] if lock in LOCKS else (lock,):
            (environment / f"{name}.stamp").write_bytes(stamp(root, name))
        print("piper-ray: ready", flush=True)
        return 0


def stamp(root: Path, lock: str) -> bytes:
    return f"{root}\n".encode() + (root / lock).read_bytes()


def is_ready(root: Path, lock: str) -> bool:
    environment = root / ".venv"
    path = environment / f"{lock}.stamp"
    return path.is_file() and path.read_bytes() == stamp(root, lock) and (environment / "bin" / "piper-ray").is_file()


def install_lock(python: Path, root: Path, lock: str) -> bool:
    if lock == TORCH_LOCK:
        return install_torch(python, root)
    return install(python, root / lock, *(RUNTIMES_OPTIONS if lock == RUNTIMES_LOCK else ()))


def install(python: Path, lock: Path, *options: str, quiet: bool = False) -> bool:
    """Python compiles the modules that are imported; pip would compile all, which doubles its time."""
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    command = [*pip, "--no-compile", "--only-binary=:all:", *options, "--require-hashes", "--no-deps", "-r", str(lock)]
    return subprocess.run(command, check=False, stderr=subprocess.DEVNULL if quiet else None).returncode == 0


def install_torch(python: Path, root: Path) -> bool:
    """The first build that is to be had and that can be imported."""
    for lock in TORCH_LOCKS:
        if install(python, root / lock, quiet=lock != TORCH_LOCK):
            return subprocess.run([str(python), "-c", "import torch"], check=False).returncode == 0
        print(f"piper-ray: nothing to install for {lock} here", flush=True)
    return False


def add_checkout(environment: Path, root: Path) -> None:
    """Makes piper_ray importable from the checkout, and the command runnable, as an editable install would."""
    (packages,) = environment.glob("lib/python3*/site-packages")
    (packages / "piper_ray_checkout.pth").write_text(f"{root}\n")
    command = environment / "bin" / "piper-ray"
    command.write_text(COMMAND.format(python=environment / "bin" / "python"))
    command.chmod(0o755)


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
    except KeyboardInterrupt:
        print("piper-ray: interrupted; the next run starts the installation again")
        sys.exit(130)
