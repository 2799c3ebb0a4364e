"""culm: one long-lived agent server that many clients share."""

__version__ = "0.1.0"
