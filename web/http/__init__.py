"""What a client's connection may do, before and after a route has its request."""
