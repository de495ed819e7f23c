"""Did the engine get what the trainer pushed? Parameter by parameter of the engine, from values or from digests."""
