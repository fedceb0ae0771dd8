"""Who owns which page of the KV pool."""
