"""Ranks, communicators and lanes: process groups, collectives, streams."""
