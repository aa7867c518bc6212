"""What slime's modules import, where its losses run without Megatron."""
