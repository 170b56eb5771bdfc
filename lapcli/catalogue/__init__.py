"""The runs of a folder together: listing, comparing, ranking, watching, renaming and removing them."""
