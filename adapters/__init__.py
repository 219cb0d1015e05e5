"""Adapters to training frameworks; installed as ``mlflash.adapters``.

Each module translates types and holds no decisions. They come with the framework issues: PyTorch DCP,
Megatron, Lightning and NeMo, Hugging Face Trainer, DeepSpeed.
"""
