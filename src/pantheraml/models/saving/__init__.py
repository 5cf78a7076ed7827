"""Write trained models for other software: merged Hugging Face folders, adapters, GGUF files, hub uploads."""
