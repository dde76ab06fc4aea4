"""PEFT's adapters: names of their tensors in files, initial values, and folders."""
