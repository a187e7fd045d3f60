"""The comparison with peers: fdp beside plain torch, DistributedDataParallel and JAX."""
