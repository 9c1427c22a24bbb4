"""Linears in float8."""
