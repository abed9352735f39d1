"""Coverage-guided fuzz: libFuzzer's bytes become scripts of requests with params, played on the real Scheduler.

`python tests/fuzz/params.py pull -runs=100000`; the targets are `pull`, `push` (NIXL), `readback` (NIXL's
turn 2) and `mooncake`; `make fuzz` runs all. Atheris follows the shim's branches, hypothesis turns bytes into
scripts (`fuzz_one_input`), and the checks are those of tests/contract/test_guard_schedulers.py. What ends a
run is written to a file in .cache/fuzz; name that file to play it again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import atheris

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / layer) for layer in ("contract", "unit"))]

with atheris.instrument_imports(include=["shim.connector", "shim.stamp"]):
    import shim.connector.guard  # noqa: F401  # imported here to be instrumented

from handoffs import mooncake, nixl  # noqa: E402  # the folders have to be on the path first
from hypothesis import given  # noqa: E402
from test_guard_schedulers import FUZZ, READBACK, play, requests_of, rig  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy

TURN_2 = nixl(do_remote_prefill=False, do_remote_decode=True)
TARGETS = {
    "pull": (("NixlConnector",), nixl()),
    "push": (("NixlPushConnector",), nixl()),
    "readback": (READBACK, TURN_2),
    "mooncake": (("MooncakeConnector",), mooncake()),
}
TOLD_EVERY = 10_000


def target(name: str) -> Callable[[bytes], None]:
    """What libFuzzer calls with its bytes."""
    key, base = TARGETS[name]
    scripts: SearchStrategy[object] = requests_of(base)

    @given(script=scripts)
    @FUZZ
    def run(script) -> None:
        play(rig(*key), key, base, script)

    one = run.hypothesis.fuzz_one_input
    counts = {"inputs": 0, "scripts": 0}

    def test_one_input(data: bytes) -> None:
        counts["inputs"] += 1
        counts["scripts"] += one(data) is not None
        if counts["inputs"] % TOLD_EVERY == 0:
            sys.stderr.write(f"{name}: {counts['inputs']} inputs, {counts['scripts']} of them whole scripts\n")

    return test_one_input


def main() -> None:
    """Fuzz one target with libFuzzer's own options."""
    name, *options = sys.argv[1:] or ["pull"]
    if name not in TARGETS:
        sys.exit(f"found {name!r}, wanted one of {', '.join(TARGETS)}")
    found = ROOT / ".cache" / "fuzz"
    found.mkdir(parents=True, exist_ok=True)
    ours = ["-max_len=2048", "-len_control=0", f"-artifact_prefix={found}/"]
    atheris.Setup([sys.argv[0], *ours, *options], target(name))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
