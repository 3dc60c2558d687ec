"""Measurements and what becomes of them: timings, records, reports."""
