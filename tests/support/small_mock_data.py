"""Megatron's mock data, of 100 documents in place of 100,000, which every rank would shuffle."""

from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

MockGPTLowLevelDataset.size = 100
