"""The shipped configuration: `hydra.searchpath: [pkg://parallelizer.configs]`. Hydra looks for this file in a package."""
