"""Data: from a recipe's source to batches, by modality (text, images, chat) over shared files, formats and caches."""
