"""The router: which replica gets a request, and what happens when that replica fails."""
