"""Published sizes of mixture-of-experts models, those of their MoE layers only."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelSize:
  """The MoE layers of a model, and how one training step runs them.

  Attributes:
    layers: decoder layers with routed experts.
    width: features of a token between layers.
    hidden: features inside an expert.
    num_experts: routed experts of a layer.
    top_k: routed experts a token.
    batch: sequences of one device.
    seq: tokens of a sequence.
    expert_axis: devices that the experts of a layer are spread over.
  """

  layers: int
  width: int
  hidden: int
  num_experts: int
  top_k: int
  batch: int = 2
  seq: int = 4096
  expert_axis: int = 4


# Each from the `config.json` that is published with the weights: num_hidden_layers, hidden_size,
# the experts' intermediate size, their number, and num_experts_per_tok.
PRESETS = {
  # deepseek-ai/DeepSeek-V3: the first 3 of 61 layers are dense. Its shared expert is left out.
  "deepseek-v3": ModelSize(layers=58, width=7168, hidden=2048, num_experts=256, top_k=8),
  # mistralai/Mixtral-8x22B-v0.1
  "mixtral-8x22b": ModelSize(layers=56, width=6144, hidden=16384, num_experts=8, top_k=2),
  # Qwen/Qwen3-235B-A22B
  "qwen3-235b-a22b": ModelSize(layers=94, width=4096, hidden=1536, num_experts=128, top_k=8),
  # openai/gpt-oss-120b
  "gpt-oss-120b": ModelSize(layers=36, width=2880, hidden=2880, num_experts=128, top_k=4),
}
