"""PEFT's adapters: their names in files, their initial values, and their folders."""
