"""`make bench`: the kernels against memory bandwidth, and beside what users would pick."""
