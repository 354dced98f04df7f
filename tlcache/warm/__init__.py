"""What compiles: shapes.json to specs, specs to a pool of workers, kernels to records."""
