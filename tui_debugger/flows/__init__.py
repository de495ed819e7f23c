"""What happens when a user acts: a flow per thing one does. No textual here; a flow is given what it needs."""
