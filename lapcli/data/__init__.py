"""Data: from a recipe's source to batches, by modality (text, images, chat), with shared file formats and caches."""
