"""Names of torchvision that vLLM and transformers import for images, without the functions.

PyTorch's CPU build of torchvision is not on the package index, and the build that is there needs
CUDA. A model that reads images is imported with these names and used for text alone.
"""

__version__ = "0.28.0"
