"""The one exception for a user's mistake."""


class UserError(ValueError):
    """Something the user can mend: the message names the value, the file and the line, and says what to do.

    Command lines print it without a traceback (see ``reliability.command_line``).
    """
