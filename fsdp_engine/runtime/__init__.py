"""What happens when: units in use, what is gathered ahead, which gradients are reduced next."""
