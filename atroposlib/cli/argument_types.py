"""Types of command line arguments: parse a text, or refuse it with a remedy."""

from __future__ import annotations

import argparse
import ipaddress


def port_number(text: str) -> int:
    """Parse a TCP port from 0 to 65535.

    Raises:
        argparse.ArgumentTypeError: the text is something else.
    """
    if not text.isdigit() or not 0 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no port; give a number from 0 (any free one) to 65535"
        )
    return int(text)


def network(text: str) -> str:
    """Parse an IP address or network, and return it in its usual form.

    Raises:
        argparse.ArgumentTypeError: the text is something else.
    """
    try:
        return str(ipaddress.ip_network(text)) if "/" in text else str(ipaddress.ip_address(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no address and no network: {error}"
        ) from None


def positive(text: str) -> int:
    """Parse a whole number above 0.

    Raises:
        argparse.ArgumentTypeError: the text is something else.
    """
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def bytes_of(text: str) -> int:
    """Parse a number of bytes, such as 4096 or 4G.

    Raises:
        argparse.ArgumentTypeError: the text is something else.
    """
    units = {"K": 10, "M": 20, "G": 30, "T": 40}
    number, shift = (
        (text[:-1], units[text[-1].upper()]) if text and text[-1].upper() in units else (text, 0)
    )
    return positive(number) << shift


def bytes_or_none(text: str) -> int:
    """Parse a number of bytes; 0 is allowed.

    Raises:
        argparse.ArgumentTypeError: the text is something else.
    """
    return 0 if text == "0" else bytes_of(text)


def seconds(text: str) -> float:
    """Parse a number of seconds above 0.

    Raises:
        argparse.ArgumentTypeError: the text is something else.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value
