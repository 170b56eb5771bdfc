"""Tables, comparisons with the paper and the page, made from run directories. Nothing here is trained or measured.

Only JSON, YAML and figures are read, without torch, so that a report of a hundred runs takes a second.
"""
