"""The error that stands for a mistake of the user's."""


class UserError(ValueError):
    """One line of text: what is wrong, its value, its rule, what to do.

    Commands print it and end with status 2. Any other ValueError is an error of this package.
    """
