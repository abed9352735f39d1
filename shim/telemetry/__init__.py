"""Sinks of the ledger: metrics through vLLM's own pipeline, spans and log lines; and their one table."""
