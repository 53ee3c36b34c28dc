"""Numbers that hold for the kernels of every architecture. No compiler needed."""

WARPGROUP_THREADS = 128
TMA_ALIGNMENT = 16  # bytes: base address and every non-unit stride of a TMA operand
SMEM_BYTES = 232448  # what one CTA may use on sm_90 and sm_100 (227 KiB)
ALIGNMENT = 1024  # a 128-byte swizzle atom: 8 rows of 128 bytes
BARRIER_BYTES = 1024  # pipeline barriers, padded to one alignment unit
MIN_STAGES = 2  # one is filled while another is read
MAX_STAGES = 16  # the kernels' barriers
CHUNK_ROW_BYTES = 128  # width of one output chunk: one swizzle span, one TMA store box
