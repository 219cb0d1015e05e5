"""Adapters to training frameworks, installed as ``mlflash.adapters``.

Each module translates between types of a framework and mlflash, and leaves decisions to mlflash. There are adapters to
torch.distributed, PyTorch DCP, FSDP with SMP's calls, Megatron, Megatron Bridge, Lightning, NeMo, the Hugging Face
Trainer, DeepSpeed, TorchTitan and TensorBoard.
"""
