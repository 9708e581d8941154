"""The decoder in C, for CPUs. Each number is summed in one order, whatever else is in the batch: see `kernels.h`."""
