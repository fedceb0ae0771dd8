"""Source adapters: how stored tensors of one kind of checkpoint become the weights they stand for."""
