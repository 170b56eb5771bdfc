"""The code that runs inside a sandbox: standard library only, and nothing of `lapcli`, which cannot be read there."""
