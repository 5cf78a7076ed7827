"""Convert a model to llama.cpp's GGUF format, with the `gguf` package."""
