"""Loads models from Hugging Face folders into shards, and saves them."""
