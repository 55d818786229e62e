"""The second tier: where chunks outlive the pool, on a disk or with other hosts."""
