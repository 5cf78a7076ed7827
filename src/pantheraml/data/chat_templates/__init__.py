"""Chat templates by name, loss on responses only, and conversations in standard form (docs/chat-templates.md)."""
