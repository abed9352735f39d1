"""A wrapper KV connector for vLLM: recovers lost transfer params and explains every local prefill.

One request's way through the shim:

    HTTP request -> entrypoint -> hand-off -> wrapped connector -> ledger -> verdict -> sinks

`plugin` makes `kv_connector: "shim"` work; `entrypoint` remembers where a request came from and attaches
it to the engine request; `connector` wraps the inner connector, recovers and screens the params; `ledger`
turns the connector's calls into one verdict per request; `telemetry` puts verdicts into metrics, spans and
log lines. Importing this package loads neither torch nor vLLM.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("vllm-kv-shim")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"
