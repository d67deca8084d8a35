"""Programs around training: preflight, sweeps, launches, reports."""
