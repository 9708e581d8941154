"""What answers which path. A module makes one blueprint; the request's life itself is in `web.live.frontend`."""
