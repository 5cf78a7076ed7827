"""Which layers get an adapter."""

from __future__ import annotations

from pantheraml.specs.import_config.draft import Draft


def set_targets(draft: Draft, key: str, modules: object) -> None:
    """Set method.target_modules from names; a regular expression cannot be translated."""
    if modules is None:
        draft.notes.append(f"{key} is not set; here every linear layer gets an adapter (method.target_modules).")
        return
    names = [modules] if isinstance(modules, str) else modules
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        draft.refuse(key, "takes names of layers")
    plain = [name for name in names if name.replace("_", "").replace(".", "").replace("-", "").isalnum()]
    if names in (["all-linear"], ["all_linear"]):
        draft.put("method.target_modules", "all-linear", key)
    elif plain and len(plain) == len(names):
        draft.put("method.target_modules", names, key)
    else:
        draft.unsupported(
            key, "regular expressions are not read: list the layers by name; until then every linear layer is taken"
        )
