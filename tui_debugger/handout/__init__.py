"""An answer handed out: a page that a colleague opens in a browser, and a comment for an issue. Of documents alone."""
