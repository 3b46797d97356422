"""What a decision costs the host: `pytest bench/micro`."""
