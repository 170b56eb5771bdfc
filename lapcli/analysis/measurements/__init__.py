"""One file for each measurement of `lap analyze`; every `Measurement` that is defined in here is registered."""
