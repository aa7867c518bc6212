"""The one answer of a reply: how it is declared, found, read and compared."""
