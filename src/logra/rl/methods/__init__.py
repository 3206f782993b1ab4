"""Ways to train the weights, behind one protocol: `logra`, `dense` (AdamW) and `lora` (peft)."""
