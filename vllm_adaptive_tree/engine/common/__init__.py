"""Parts that the adapters of both model runners share."""
