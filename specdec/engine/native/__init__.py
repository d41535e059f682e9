"""Native CPU kernels in C++: built into a wheel, or compiled on first use if there is a compiler.

simd.h          float vectors of the CPU's own width thread_pool.h   a team of threads that sleeps when idle packed.h
formats of weights in memory, which hold float32 numbers exactly packing.cpp     packs them linear.h        skinny
matrix products, one fixed accumulator per output linear.cpp      their inner loops attention.h     attention of one row
over the paged cache kernels.cpp     the C interface of products and attention scan.cpp        recurrences of a matrix
per head decoder.cpp     a whole decoder step in one call variants.py     instruction sets of builds, and this machine's
build.py        finds them, or compiles them once packing.py      chooses formats and packs tensors kernels.py
calls them on tensors
"""
