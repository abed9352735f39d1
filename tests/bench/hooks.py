"""What the shim costs in EngineCore, paired in one run: bare NIXL, shim, MultiConnector around NIXL alone.

`python tests/bench/hooks.py` prints the tables of BENCHMARKS.md; `--write` writes them there. Real Scheduler,
real NIXL scheduler classes; medians of rounds in which the variants take turns, so that a machine whose speed
drifts drifts for all of them alike.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "contract")]

from scheduling import Steps, make_config, make_request, make_scheduler  # noqa: E402
from vllm import __version__ as vllm_version  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheBlocks  # noqa: E402
from vllm.v1.core.kv_cache_utils import KVCacheBlock  # noqa: E402

from shim import plugin, stamp  # noqa: E402
from shim.config import Settings  # noqa: E402
from shim.connector.screening import guard_for  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

BATCHES = (1, 16, 256, 1024)
CHILD = '{"connectors": [{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}]}'
VARIANTS: dict[str, tuple[str, str | None, str]] = {
    "bare NIXL": ("NixlConnector", None, "{}"),
    "shim": ("NixlConnector", plugin.MODULE, "{}"),
    "MultiConnector": ("MultiConnector", None, CHILD),
}
ROUNDS = 41
CALLS = 200
HANDOFF = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "7d0e1a5c-0a4f-4f8e-9f5b-0d8f1d3c2b1a",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 3500,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
}


def scheduler_with(variant: str, running: int) -> tuple[Any, Any]:
    """A real scheduler that decodes `running` requests, and one step's real output."""
    name, path, extra = VARIANTS[variant]
    config = make_config(name, path, extra=extra, seqs=max(running, 8), batched_tokens=max(64, running * 24))
    scheduler = make_scheduler(config, blocks=running * 40 + 100)
    steps = Steps(scheduler)
    for number in range(running):
        steps.add(make_request(f"r{number}", [number % 250 + 1] * 20, max_tokens=400))
    while any(request.num_output_tokens < 2 for request in scheduler.requests.values()):
        steps.schedule()
        steps.update()
    output = steps.schedule()
    return scheduler, output


def step_hooks(connector: Any, output: Any) -> None:
    """What the scheduler calls in a step in which no request changes state."""
    connector.build_connector_meta(output)
    connector.get_kv_connector_stats()
    connector.take_events()
    connector.has_pending_push_work()


def paired(runs: dict[str, Callable[[], None]], calls: int) -> dict[str, float]:
    """Median microseconds of one call of each, taking turns."""
    took: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for round_ in range(ROUNDS):
        for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
            run = runs[name]
            began = time.perf_counter()
            for _ in range(calls):
                run()
            took[name].append((time.perf_counter() - began) / calls * 1e6)
    return {name: statistics.median(times) for name, times in took.items()}


def per_step() -> list[str]:
    """The table of a step's hooks."""
    rows = [
        "| running | bare | shim | MultiConnector | shim adds | MultiConnector adds | ratio |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for running in BATCHES:
        made = {variant: scheduler_with(variant, running) for variant in VARIANTS}
        runs = {
            variant: (lambda c=scheduler.connector, o=output: step_hooks(c, o))
            for variant, (scheduler, output) in made.items()
        }
        median = paired(runs, CALLS)
        bare, ours, multi = (median[variant] for variant in VARIANTS)
        rows.append(
            f"| {running} | {bare:.2f} | {ours:.2f} | {multi:.2f} | {ours - bare:.2f} | {multi - bare:.2f} "
            f"| {(ours - bare) / (multi - bare):.2f} |"
        )
    return rows


def handoff_of(number: int, tokens: int = 64) -> dict[str, Any]:
    """A hand-off like NIXL's for a prompt of the test model."""
    blocks = -(-tokens // 16)
    return {
        **HANDOFF,
        "remote_num_tokens": tokens,
        "remote_request_id": f"cmpl-{number}",
        "remote_block_ids": [list(range(blocks))],
    }


def a_request(connector: Any, request: Any, output: Any, done: Any) -> None:
    """All of one decode's events at the connector, as the scheduler brings them."""
    connector.on_new_request(request)
    connector.get_num_new_matched_tokens(request, 0)
    connector.update_state_after_alloc(request, BLOCKS, 64)
    connector.update_connector_output(done)
    connector.update_state_after_alloc(request, BLOCKS, 0)
    request.num_computed_tokens = 63
    connector.build_connector_meta(output)
    connector.get_kv_connector_stats()
    connector.request_finished_all_groups(request, ([],))


BLOCKS = KVCacheBlocks(([KVCacheBlock(number) for number in range(1, 5)],))


def per_request() -> list[str]:
    """The cost of one request, all its events together."""
    from types import SimpleNamespace

    took: dict[str, list[float]] = {"bare NIXL": [], "shim": []}
    made = {variant: scheduler_with(variant, 1)[0].connector for variant in took}
    number = 0
    for round_ in range(ROUNDS * 20):
        for variant in sorted(took, reverse=bool(round_ % 2)):
            number += 1
            request = make_request(f"q{number}", [1] * 64, params=handoff_of(number))
            output = SimpleNamespace(
                preempted_req_ids=None,
                num_scheduled_tokens={request.request_id: 1},
                scheduled_new_reqs=[],
                scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set()),
                finished_req_ids=set(),
            )
            done = SimpleNamespace(
                finished_recving={request.request_id},
                finished_sending=None,
                failed_recving=None,
                invalid_block_ids=set(),
                kv_connector_stats=None,
            )
            began = time.perf_counter()
            a_request(made[variant], request, output, done)
            took[variant].append((time.perf_counter() - began) * 1e6)
    bare, ours = (statistics.median(took[variant]) for variant in ("bare NIXL", "shim"))
    return [
        "| what | µs |",
        "| --- | ---: |",
        f"| one decode, all its events, bare NIXL | {bare:.1f} |",
        f"| the same, shim | {ours:.1f} |",
        f"| shim adds | {ours - bare:.1f} |",
    ]


def screening() -> list[str]:
    """Screening a normal hand-off of 3,500 tokens, and the digest's slope."""
    config = make_config("NixlConnector", plugin.MODULE)
    guard = guard_for(config.kv_transfer_config, Settings(), kv_cache_config=_one_group(), block_size=32)
    params = {**HANDOFF, "remote_request_id": "cmpl-1", "remote_block_ids": [list(range(110))]}
    asked = paired({"screen": lambda: guard.screen("r", params, prompt_tokens=3500) and None}, 500)["screen"]
    source = random.Random(1)  # no secret
    prompts = {n: [source.randrange(150_000) for _ in range(n)] for n in (1_000, 100_000)}
    digests = paired({str(n): (lambda t=t: stamp.digest(t, len(t)) and None) for n, t in prompts.items()}, 20)
    slope = (digests["100000"] - digests["1000"]) / 99
    return [
        "| what | µs |",
        "| --- | ---: |",
        f"| screening a hand-off of 3,500 tokens (110 blocks), in EngineCore | {asked:.1f} |",
        f"| digest of 1,000 tokens, in the API server | {digests['1000']:.1f} |",
        f"| digest, each further 1,000 tokens | {slope:.1f} |",
    ]


def _one_group() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return KVCacheConfig(
        num_blocks=10, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )


def main() -> None:
    """Print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write BENCHMARKS.md")
    arguments = parser.parse_args()
    plugin.install()
    text = "\n".join(
        [
            "# Benchmarks",
            "",
            f"`python tests/bench/hooks.py --write`: vLLM {vllm_version}, Python {platform.python_version()}.",
            "Medians in µs; the variants take turns in one run. Machines are noisy: compare within a table.",
            "",
            "## A step in which no request changes state",
            "",
            "`build_connector_meta`, `get_kv_connector_stats`, `take_events`, `has_pending_push_work`, as the",
            "scheduler calls them, with real decodes running.",
            "",
            *per_step(),
            "",
            "## A request, all its events in EngineCore",
            "",
            *per_request(),
            "",
            "## Defence",
            "",
            *screening(),
            "",
        ]
    )
    if arguments.write:
        (ROOT / "BENCHMARKS.md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
