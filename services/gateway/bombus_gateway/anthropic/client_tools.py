"""Data: the tools in Anthropic's API that the client runs and whose schemas are built into Anthropic's models.

Other models are given a function with the same schema. The date at the end of a tool's type is its version.
"""

from typing import Any


def _object(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


_BASH = {
    "description": "Run a command in a bash session that stays open between calls.",
    "parameters": _object(
        [],
        command={"type": "string", "description": "The command. Needed unless the session is restarted."},
        restart={"type": "boolean", "description": "Whether to begin a new session instead."},
    ),
}
_TEXT_EDITOR = {
    "description": "View, create and edit text files.",
    "parameters": _object(
        ["command", "path"],
        command={"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
        path={"type": "string", "description": "The file or, for view, a folder."},
        view_range={
            "type": "array",
            "items": {"type": "integer"},
            "description": "For view: the first line (from 1) and the last line (-1 for the end).",
        },
        file_text={"type": "string", "description": "For create: the whole text of the file."},
        old_str={"type": "string", "description": "For str_replace: text that occurs exactly once in the file."},
        new_str={"type": "string", "description": "For str_replace: the text to put in its place."},
        insert_line={"type": "integer", "description": "For insert: the line to insert after, 0 for the beginning."},
        insert_text={"type": "string", "description": "For insert: the text."},
    ),
}
CLIENT_TOOLS: dict[str, dict[str, Any]] = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20250429": _TEXT_EDITOR,
    "text_editor_20250728": _TEXT_EDITOR,
}
