"""How a process tells its launcher that it ended because of a user's mistake, so that another try is useless."""

import json
import os

USER_ERROR = "the user has to mend something"


def note_user_error() -> None:
    """Writes the file that torchrun looks into when one of its processes has failed; does nothing without torchrun."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with open(path, "w") as file:
            json.dump({"message": USER_ERROR}, file)
