"""Tests of parallelizer/compiler/pipeline."""
