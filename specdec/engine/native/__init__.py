"""Native CPU kernels in C++, built on first use where a compiler is there.

simd.h          float vectors of the CPU's own width
thread_pool.h   a team of threads that sleeps when idle
linear.h        skinny matrix products, one fixed accumulator per output
attention.h     attention of one row over the paged cache
kernels.cpp     the C interface of the two
decoder.cpp     a whole decoder step in one call
build.py        compiles them, once per machine and version
kernels.py      calls them on tensors
"""
