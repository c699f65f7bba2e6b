"""Other versions of other libraries, each in a folder of its own that lies over the tests' environment.

    python tests/peers/environments.py       makes those that are missing or out of date; ``make peers``

What a file of ``requirements/`` pins goes to ``build/peers/NAME/site-packages``, without what it depends
on: torch and most else come from the environment below, and are the same in all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent / "requirements"
BUILT = Path(__file__).resolve().parents[2] / "build" / "peers"
NAMES = tuple(sorted(path.stem for path in REQUIREMENTS.glob("*.txt")))
# An import or a build in an environment that takes long, once.
PREPARATIONS = {
    # On a CPU every start of DeepSpeed wants its shared memory collectives, and compiles them.
    "deepspeed": "from deepspeed.ops.op_builder import cpu; cpu.ShareMemCommBuilder().load(verbose=False)",
}
NEED_A_COMPILER = ("deepspeed",)


def folder_of(name: str) -> Path:
    # dill takes a module for the user's own, to be pickled whole, unless "site-packages" is in its path.
    return BUILT / name / "site-packages"


def digest_of(name: str) -> str:
    text = (REQUIREMENTS / f"{name}.txt").read_text() + PREPARATIONS.get(name, "") + sys.version
    return hashlib.sha256(text.encode()).hexdigest()


def why_not(name: str) -> str:
    """Why there can't be such an environment on this machine; empty where there can."""
    if name in NEED_A_COMPILER and not shutil.which(os.environ.get("CXX", "c++")):
        return f"{name} compiles its collectives when it starts, and there is no C++ compiler here"
    return ""


def is_ready(name: str) -> bool:
    stamp = BUILT / name / "ready"
    return name == "here" or (stamp.exists() and stamp.read_text() == digest_of(name))


def variables(name: str) -> dict[str, str]:
    """The process environment of a script in an environment; no hub, no accelerator, one thread."""
    path = [str(folder_of(name)), os.environ.get("PYTHONPATH", "")] if name != "here" else []
    programs = [str(folder_of(name) / "bin"), os.environ.get("PATH", "")]
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV_"))},
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PATH": os.pathsep.join(programs),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(BUILT / name / "extensions"),
    }


def make(name: str) -> None:
    """Install what the requirements pin, from nothing."""
    shutil.rmtree(BUILT / name, ignore_errors=True)
    folder_of(name).mkdir(parents=True)
    requirements = str(REQUIREMENTS / f"{name}.txt")
    words = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--disable-pip-version-check"]
    run(name, [*words, "--target", str(folder_of(name)), "--requirement", requirements], dict(os.environ))
    if name in PREPARATIONS:
        run(name, ["-c", PREPARATIONS[name]], variables(name))
    (BUILT / name / "ready").write_text(digest_of(name))


def run(name: str, words: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"The environment {name} could not be made:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )


def main() -> None:
    missing = [name for name in NAMES if not is_ready(name)]
    for name in [name for name in missing if why_not(name)]:
        print(f"no environment {name}: {why_not(name)}")
        missing.remove(name)
    # Mostly waiting for downloads; together they take as long as the longest.
    with ThreadPoolExecutor(max(1, len(missing))) as together:
        list(together.map(make, missing))
    print("environments of peers:", *(name for name in NAMES if is_ready(name)))


if __name__ == "__main__":
    main()
