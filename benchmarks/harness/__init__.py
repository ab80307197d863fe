"""What every benchmark shares: rows and their ratios, paired measuring, fio, and the peer in a process of its own."""
