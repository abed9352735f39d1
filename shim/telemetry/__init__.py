"""Sinks of the ledger: metrics through vLLM's own pipeline, spans, log lines; and the table of metrics they share."""
