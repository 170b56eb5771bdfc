"""Tables, comparisons with the paper and the page, from what run directories hold. Nothing here is trained or measured.

Only JSON, YAML and files of figures are read: no torch, so that a report of a hundred runs takes a second.
"""
