"""What runs inside a sandbox: standard library only, and imports nothing of `lapcli`, which is not there."""
