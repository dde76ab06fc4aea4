"""Models of Hugging Face folders: into shards, and out of them."""
