"""Conversations: sources, tokens and batches."""
