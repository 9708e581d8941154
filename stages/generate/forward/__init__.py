"""A BatchPlan becomes token ids: weights, batch tensors, sampling."""
