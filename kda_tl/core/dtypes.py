"""Element types by the names that problems and records use."""

import torch

TORCH_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "i32": torch.int32}
NAME_OF_DTYPE = {dtype: name for name, dtype in TORCH_DTYPE.items() if name != "i32"}
