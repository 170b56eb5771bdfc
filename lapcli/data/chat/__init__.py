"""Conversations: where they come from, how they become tokens, and how those become batches."""
