"""Messages between the coordinator and the sites, their encoding as bytes, and the transport that carries the bytes."""
