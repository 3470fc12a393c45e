"""Messages to a site itself, the encoding of all messages as bytes, and the transport that carries the bytes."""
