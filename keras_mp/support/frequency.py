"""How often something is done while a model trains."""

from keras_mp.support import validation


def epoch_or_integer(name: str, value: str | int) -> str | int:
    """Checks that an argument is "epoch", or a number of batches.

    Args:
        name: str. The argument's name, for the message.
        value: the argument.

    Returns:
        The value.

    Raises:
        TypeError: it is neither a str nor an int.
        ValueError: it is another str, or below 1.
    """
    if not isinstance(value, str):
        return validation.integer(name, value)
    if value != "epoch":
        raise ValueError(f'`{name}` must be "epoch" or an int. Received: {name}={value!r}')
    return value
