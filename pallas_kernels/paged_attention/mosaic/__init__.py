"""What the Mosaic GPU kernels of paged attention have in common, whichever GPU they are for.

- `plan`: what a kernel is compiled for. `work`: the step's queries cut into tiles and the tiles' keys among the
  workers. `pieces`: a worker's way through its share.
- `softmax`: which keys a row sees, and the online softmax of a K/V tile's scores.
- `merge`: tiles that were divided among workers get their result.
- `attention`: the interface of an implementation, without its kernel. `toolchain`: the versions it needs.
"""
