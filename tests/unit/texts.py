"""Reads what the project's texts name, and says which of these names do not exist.

A name is found by its form: all that stands in code (backticks, fences) must be known, and what can only be
ours (`KVShim…`, `SHIM_…`, `vllm:kv_shim_…`, links, paths) is looked for everywhere.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from typer.main import get_command

from shim import config
from shim.cli import app
from shim.connector.profiles.table import PROFILES
from shim.telemetry import catalog, log, provider, spans
from shim.telemetry.advice import ADVICE
from shim.verdict import HandoffReason, Reason, ReasonClass, Source

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from dashboards import alerts, check, links, runbook  # noqa: E402  # the repository's folder first

PAGES = [
    *(path for path in ROOT.glob("*.md")),
    *(path for path in (ROOT / "dashboards").rglob("*") if path.suffix in {".md", ".yaml", ".yml"}),
    ROOT / "Makefile",
]
DASHBOARDS_OWN = ROOT / "dashboards"

SOMEBODY_ELSES = {
    # programs
    *(
        "amtool",
        "apt-get",
        "curl",
        "docker",
        "grep",
        "kubectl",
        "kustomize",
        "pip",
        "promtool",
        "py-spy",
        "vllm",
    ),
    # vLLM: modules, classes, functions, their parameters
    *("AsyncLLM.add_request", "AsyncLLM.generate", "EngineCoreClient", "EngineCoreClient.add_request_async"),
    *("KVTransferConfig.__post_init__", "VllmConfig.__post_init__", "SupportsHMA", "abort_immediately"),
    *("build_connector_meta", "get_kv_connector_stats", "get_num_new_matched_tokens", "has_pending_push_work"),
    *("take_events", "trace_headers", "extra_args", "max_tokens", "stream", "n", "stop", "isinstance"),
    # vLLM: settings and their values
    *("kv_connector", "kv_connector_extra_config", "kv_connector_module_path", "kv_lease_duration", "kv_role"),
    *("kv_load_failure_policy", "kv_consumer", "kv_producer", "kv_both", "fail", "recompute", "engine", "role"),
    *("VLLM_LOGGING_LEVEL", "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "VLLM_PLUGINS", "bidirectional_kv_xfer"),
    *("kv_transfer_params", "ec_transfer_params"),
    # vLLM: metrics
    *("prompt_tokens_by_source", "vllm:prefix_cache_hits_total", "model_name"),
    "MultiConnector",
    "vllm:nixl_num_notifications_after_expiry_total",
    # W3C, Prometheus, Kubernetes, JSON, llm-d, Tempo
    *("prefill-decode", "probe"),
    *(
        "traceparent",
        "job",
        "instance",
        "cluster",
        "namespace",
        "matchLabels",
        "null",
        "true",
        "false",
        "DEBUG",
    ),
    # forms of a setting's value
    *("package.module:Class", "host", "cidr"),
    # roles that the scrape gives
    *("prefill", "decode", "both"),
}
"""What is named and not ours to check; a new one is added on purpose."""

_FENCE = re.compile(r"(?ms)^```.*?^```")
_SPAN = re.compile(r"`([^`\n]+)`")
_VALUE = re.compile(r'(?P<label>[a-z_]+)(?:=~|!~|!=|=)\\?"(?P<values>[^"\\{}$]*)\\?"')
_OURS = re.compile(
    r"(?<![\w/])(?P<alert>KVShim\w*)|(?<!\w)(?P<env>SHIM_[A-Z_]+)"
    r"|(?P<metric>(?:vllm:)?kv_shim_\w+|kv_shim:[\w:]+)|/d/(?P<uid>[\w-]+)"
    r"|(?<![\w./-])(?P<path>(?:shim|tests|dashboards)/[\w./*-]+)"
)
_LINK = re.compile(r"\]\((?P<file>[^)#\s]*)(?:#(?P<anchor>[^)\s]*))?\)")


def texts() -> dict[str, str]:
    """Every text, by where it stands: pages, alerts, panels as generated, advice, metrics' help."""
    found = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PAGES}
    for alert in alerts.alerts():
        found[f"alert {alert.name}"] = f"{alert.summary}\n{alert.description}"
    for path in check.GENERATED.glob("*.json"):
        for panel in msgspec.json.decode(path.read_bytes())["panels"]:
            content = (panel.get("options") or {}).get("content", "")
            found[f"panel {path.stem}: {panel['title']}"] = f"{panel.get('description', '')}\n{content}"
    for reason, advice in ADVICE.items():
        found[f"advice {reason}"] = f"{advice.found}\n{advice.do}"
    for metric in catalog.CATALOG:
        found[f"help {metric.name}"] = metric.help
    return found


class Names:
    """All names there are."""

    def __init__(self) -> None:
        self.commands = dict(_commands(get_command(app), ("shim",)))
        self.targets = set(re.findall(r"(?m)^([a-z][\w-]*)(?: [a-z][\w-]*)*:", (ROOT / "Makefile").read_text()))
        self.targets |= set(
            (re.search(r"(?m)^\.PHONY: (.*)$", (ROOT / "Makefile").read_text()) or [""])[1].split()
        )
        self.metrics = set(_metrics())
        self.alerts = {alert.name for alert in alerts.alerts()}
        self.uids = {links.FLEET_UID, links.INSTANCE_UID, links.RUNBOOK_UID}
        self.environment = {config.DISABLE_ENV, config.ENTRYPOINT_ENV, config.STAMP_KEY_ENV}
        self.environment |= set(re.findall(r"SHIM_[A-Z_]+", "".join(_sources())))
        self.values = _values()
        self.settings = {field.name for field in msgspec.structs.fields(config.Settings)}
        self.words = self._words()

    def _words(self) -> set[str]:
        names = self.metrics | self.alerts | self.uids | self.environment | self.settings | SOMEBODY_ELSES
        names |= {*self.values, *(value for values in self.values.values() for value in values)}
        names |= {label for metric in catalog.CATALOG for label in metric.labels}
        names |= {metric.removeprefix("vllm:") for metric in self.metrics}
        names |= {metric.removeprefix(catalog.PREFIX) for metric in self.metrics}
        names |= {*Reason, *HandoffReason, *ReasonClass, *Source, *config.ExpectRemote, "allow", "refuse"}
        names |= {str(key) for profile in PROFILES.values() for key in profile.keys} | set(PROFILES)
        names |= {span.value for span in spans.SpanName}
        names |= {attribute for full in spans.ATTRIBUTES for attribute in (full, full.removeprefix(_ATTRIBUTE))}
        names |= {*provider.ENDPOINTS, log.LOGGER, "vllm-kv-shim", catalog.PREFIX, "kv_shim", config.SECTION}
        names |= {alert.severity for alert in alerts.alerts()}
        names |= {path.stem for path in (ROOT / "shim").rglob("*") if path.suffix == ".py" or path.is_dir()}
        names |= {entry.name for entry in runbook.read()}
        return {str(name) for name in names}


_ATTRIBUTE = "vllm.kv_transfer."


def _commands(command: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    yield path, {option for each in command.params for option in each.opts}  # type: ignore[attr-defined]
    for name, child in getattr(command, "commands", {}).items():
        yield from _commands(child, (*path, name))


def _sources() -> Iterator[str]:
    for folder in ("shim", "tests/e2e", "tests/contract"):
        yield from (path.read_text() for path in (ROOT / folder).rglob("*.py"))
    for path in (ROOT / "dashboards").rglob("Dockerfile"):
        yield path.read_text()
    yield (ROOT / "tests/run_all.py").read_text()


def _metrics() -> Iterator[str]:
    for metric in catalog.CATALOG:
        suffixes = ("", "_bucket", "_sum", "_count") if metric.kind is catalog.Kind.HISTOGRAM else ("",)
        for suffix in suffixes:
            yield metric.wire_name + suffix
    yield from (rule["record"] for rule in alerts.recordings())


def _values() -> dict[str, set[str]]:
    """The values that each of the catalogue's labels may have; of `info`, those that are closed."""
    found: dict[str, set[str]] = {}
    for metric in catalog.CATALOG:
        for labels in metric.series:
            for label, value in zip(metric.labels, labels, strict=True):
                found.setdefault(label, set()).add(str(value))
    found["state"] |= {*map(str, catalog.ShimState)}
    found["expect_remote"] = {*map(str, config.ExpectRemote)}
    found["kv_role"] = {"kv_both", "kv_consumer", "kv_producer"}
    found["failure_policy"] = {"fail", "recompute"}
    found["source"] |= {"local_compute", "external_kv_transfer"}  # of vLLM's prompt_tokens_by_source
    found["hook"] |= {"entrypoint"}  # by which an alert joins the API server's faults to the engine's
    found["window"] = set(alerts.RATIO_WINDOWS)
    return found


NAMES = Names()


def unknown(text: str, folder: Path = ROOT) -> list[str]:
    """What a text names and there is not, each as `kind name`.

    Args:
        text: markdown or plain.
        folder: where it stands, for links and files.
    """
    found = [*_unknown_anywhere(text, folder)]
    for code in [*_FENCE.findall(text), *_SPAN.findall(_FENCE.sub("", text))]:
        found += _unknown_in_code(code, folder)
    return sorted(set(found))


def _unknown_anywhere(text: str, folder: Path) -> Iterator[str]:
    yield from _unknown_ours(text, folder)
    for match in _VALUE.finditer(text):
        values = NAMES.values.get(match["label"])
        given = {value for value in match["values"].split("|") if value not in {"", ".*", ".+"}}
        if values is not None:
            yield from (f"label {match['label']}={value}" for value in given - values)
    for match in _LINK.finditer(text):
        if not match["file"].startswith(("http:", "https:", "mailto:", "/", "$")):
            yield from _broken(match, text, folder)


def _unknown_ours(text: str, folder: Path) -> Iterator[str]:
    known = {
        "alert": {*NAMES.alerts, "KVShim"},
        "env": NAMES.environment,
        "metric": NAMES.words | {"kv_shim_stamp"},
        "uid": NAMES.uids,
    }
    for match in _OURS.finditer(text):
        kind = str(match.lastgroup)
        name = match[kind].rstrip(".")
        if kind == "path":
            if not _is_file(name, folder):
                yield f"file {name}"
        # A beginning, as in `grep kv_shim_`.
        elif name not in known[kind] and not (kind == "metric" and name.endswith("_")):
            yield f"{kind} {name}"


def _broken(match: re.Match[str], text: str, folder: Path) -> Iterator[str]:
    target = folder / match["file"]
    if match["file"] and not target.exists():
        yield f"link {match['file']}"
    elif match["anchor"]:
        page = target.read_text(encoding="utf-8") if match["file"] else text
        headings = re.findall(r"(?m)^#+ (.*)$", page)
        slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        if match["anchor"] not in slugs:
            yield f"link {match['file']}#{match['anchor']}"


def _unknown_in_code(code: str, folder: Path) -> Iterator[str]:
    for line in code.splitlines():
        words = line.split()
        if not words or line.startswith(("```", "#")):
            continue
        if words[0] == "shim" and len(words) > 1:
            yield from _unknown_command(words)
        elif words[0] == "make":
            yield from (f"make {word}" for word in words[1:] if word.isalpha() and word not in NAMES.targets)
        elif words[:2] == ["python", "-m"]:
            if find_spec(words[2]) is None:
                yield f"module {words[2]}"
        elif words[0] == "python" and not _is_file(words[1], folder):
            yield f"file {words[1]}"
    if "\n" not in code:
        yield from _unknown_word(code, folder)
    for setting in re.findall(r'"shim": \{([^{}]*)\}', code):
        yield from (f"setting {key}" for key in re.findall(r'"(\w+)":', setting) if key not in NAMES.settings)


def _unknown_command(words: list[str]) -> Iterator[str]:
    path: tuple[str, ...] = ("shim",)
    for word in words[1:]:
        if any(known[: len(path) + 1] == (*path, word) for known in NAMES.commands):
            path = (*path, word)
        else:
            break
    if len(path) == 1 or (any(k[: len(path)] == path and k != path for k in NAMES.commands)):
        yield "command " + " ".join(words)
    for word in words:
        if word.startswith("--") and word not in NAMES.commands[path]:
            yield f"command {' '.join(path)} {word}"


def _unknown_word(code: str, folder: Path) -> Iterator[str]:
    """A single name in backticks, with or without a value: `name`, `name=value`, `name: value`, `"name"`."""
    found = re.fullmatch(r'"?([A-Za-z_][\w.:/*-]*)"?(?:\[.*\]|\{.*\}|[=:] ?"?([\w.-]+)"?)?', code)
    if found is None:
        first = code.split(maxsplit=1)[0]
        known = NAMES.words | {"shim", "make", "python"}
        if " " in code and re.fullmatch(r"[a-z][a-z-]+", first) and first not in known:
            yield f"program {first}"
        return
    for name in found.groups():
        if not name or not re.search("[A-Za-z]", name) or "://" in name or name in NAMES.words:
            continue
        is_module = re.fullmatch(r"shim(\.\w+)+", name) and find_spec(name)
        if not is_module and not _is_file(name, folder):
            yield f"name {name}"


def _is_file(name: str, folder: Path) -> bool:
    """Whether there is such a file or folder, by a path from the text's folder or the root; `*` for any."""
    name = name.strip("/")
    folders = ("generated", "deploy/compose", "deploy/kubernetes")
    places = (folder, ROOT, DASHBOARDS_OWN, *(DASHBOARDS_OWN / each for each in folders))
    if "*" in name:
        return any(True for place in places for _ in place.glob(name))
    if any((place / name).exists() for place in places):
        return True
    return "/" not in name and "." in name and any(DASHBOARDS_OWN.rglob(name))


def where(name: str) -> Path:
    """The folder that a text's relative links start from."""
    return (ROOT / name).parent if (ROOT / name).is_file() else ROOT


def all_unknown() -> list[str]:
    """What any of the texts names and there is not."""
    return [f"{at}: {name}" for at, text in texts().items() for name in unknown(text, where(at))]
