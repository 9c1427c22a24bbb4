"""Tests of parallelizer/runtime/pipeline."""
