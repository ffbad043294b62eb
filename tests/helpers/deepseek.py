"""DeepSeek-V3: 58 MoE layers, 262,144 rows at worst, a quarter of them routed, of 7168 bfloat16."""

LAYERS, WORST_CASE_ROWS, ROUTED_ROWS, WIDTH = 58, 262_144, 65_536, 7168
CAPACITY = LAYERS * ROUTED_ROWS


def num_bytes(*structs):
  return sum(s.size * s.dtype.itemsize for s in structs)
